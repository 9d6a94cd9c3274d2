"""The parent process: starts, watches, replaces and drains the workers; never imports torch."""
