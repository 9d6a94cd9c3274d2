"""ASGI application: outer middleware, routes, request context, replies, problems (the only status codes)."""
