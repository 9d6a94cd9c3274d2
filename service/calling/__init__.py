"""The caller's side: what the client sends and what it makes of the answer."""
