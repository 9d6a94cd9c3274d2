"""Sockets and bytes below ASGI: the listener, connections, heads and bodies, deadlines."""
