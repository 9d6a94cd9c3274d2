"""Commands of the command line, and the modules that only they use."""
