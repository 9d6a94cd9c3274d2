"""The street's shops: what each command of the command line does."""
