"""The desk: bytes to checked tensors and back; everything that can be wrong with one request is found here."""
