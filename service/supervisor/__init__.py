"""Supervisor: the parent process, which starts, checks, replaces and drains the workers; never imports torch."""
