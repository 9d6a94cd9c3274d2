"""Writes a seeded attention layer, 512 wide with 8 heads, as torch.nn.MultiheadAttention would save it.

    python examples/make_demo_layer.py demo.safetensors
    attention-service layers import demo.safetensors --name demo --heads 8

The tensors have the same bytes on every machine: the generator is one that NumPy keeps unchanged for good, and no step
after it rounds more than once. Nobody trained this layer; its attention means nothing.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

WIDTH = 512
SEED = 1706  # the month of "Attention Is All You Need"


def demo_tensors(width: int = WIDTH, seed: int = SEED) -> dict[str, npt.NDArray[np.float32]]:
    """Uniform in ±sqrt(6 / (in + out)) for the weights (Xavier), ±1/sqrt(width) for the biases."""
    generator = np.random.RandomState(seed)
    shapes_and_bounds = {
        "in_proj_weight": ((3 * width, width), math.sqrt(6 / (4 * width))),
        "in_proj_bias": ((3 * width,), 1 / math.sqrt(width)),
        "out_proj.weight": ((width, width), math.sqrt(6 / (2 * width))),
        "out_proj.bias": ((width,), 1 / math.sqrt(width)),
    }
    return {
        name: ((generator.random_sample(shape) - 0.5) * (2 * bound)).astype(np.float32)
        for name, (shape, bound) in shapes_and_bounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the seeded demo layer as a safetensors file.")
    parser.add_argument("path", help="the file to write, ending in .safetensors")
    save_file(demo_tensors(), parser.parse_args().path)


if __name__ == "__main__":
    main()
