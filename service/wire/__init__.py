"""Wire formats: decodes and checks requests, encodes answers; synchronous, finds every error of one request."""
