"""The engine room: knows tensors; no asyncio, no HTTP, no pydantic."""
