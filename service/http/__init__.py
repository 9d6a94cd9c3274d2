"""HTTP transport below ASGI: the listener, connections, request heads and bodies, deadlines."""
