"""Batching: jobs, fair queueing, admission and the batcher; independent of torch and HTTP."""
