"""Command `attention`, the extra `cli`: asks a service from the terminal. The rest of the package imports nothing of it."""
