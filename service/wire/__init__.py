"""Bytes to checked tensors and back, synchronous; everything wrong with one request is found here."""
