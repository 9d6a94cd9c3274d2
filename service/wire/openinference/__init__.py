"""Requests and answers of the Open Inference Protocol."""
