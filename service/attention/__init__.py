"""Tensors: masks, packing, kernels, layers, the engine; no asyncio, no HTTP, no pydantic."""
