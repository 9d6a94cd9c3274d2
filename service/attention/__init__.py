"""Tensor code: masks, packing, kernels, layers and the engine; no asyncio, no HTTP, no pydantic."""
