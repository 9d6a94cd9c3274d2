"""Loads mutated checkpoints, one after another: `python -m tests.torture.load_mutants DIRECTORY SEED COUNT`.

Invariants: what is being loaded lies in the directory while it is, so that a death leaves its cause behind; a load that takes
five seconds is reported as a hang; the end is one JSON object: `hangs`, `wrong`, `counts`.
"""

from __future__ import annotations

import collections
import json
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from service.errors import LayerError
from service.layers.importer import import_layer
from service.layers.store import Store, StoredLayer
from tests.integration.running import small_layer
from tests.torture.answer_rules import MAX_REFUSAL_BYTES
from tests.torture.inputs.mutations import mutate_bytes, mutate_safetensors

HANG_S = 5.0
# Refusals quote names of the checkpoint, which a user who imports it needs.
_FOREIGN = ("Traceback", "Error(", "site-packages", "0x7f")


class Hang(BaseException):
    pass


def main(directory: Path, seed: int, count: int) -> dict:
    hangs: list[str] = []
    wrong: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    sources = [_stored(directory / "stored"), _foreign(directory / "foreign")]
    signal.signal(signal.SIGALRM, _alarm)
    for number in range(count):
        rng = random.Random(f"{seed} checkpoint {number}")
        content, load, digest = sources[number % len(sources)]
        try:
            signal.setitimer(signal.ITIMER_REAL, HANG_S)
            layer = load(mutate(content, rng))
        except LayerError as error:
            counts["refused"] += 1
            if any(word in error.message for word in _FOREIGN) or len(error.message) > MAX_REFUSAL_BYTES:
                wrong.append(f"#{number} says {error.message[:200]}")
        except Hang:
            hangs.append(f"#{number}")
        except Exception as error:  # noqa: BLE001 (whatever else it raises is what is looked for)
            wrong.append(f"#{number} raised {type(error).__name__}: {str(error)[:200]}")
        else:
            counts["loaded"] += 1
            if layer.digest != digest and digest is not None:
                wrong.append(f"#{number} loaded as another layer")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return {"hangs": hangs, "wrong": wrong, "counts": counts}


def mutate(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice(
            [b"", content[: rng.randrange(9)], b"\x80\x04\x95" + content, b"PK\x03\x04" + content, rng.randbytes(200)]
        )
    content = mutate_safetensors(content, rng)
    return mutate_bytes(content, rng) if rng.random() < 0.2 else content


def _stored(directory: Path) -> tuple[bytes, Callable[[bytes], StoredLayer], str | None]:
    store, layer = Store(directory), small_layer("small")
    path = store.save(layer)

    def load(content: bytes) -> StoredLayer:
        path.write_bytes(content)
        return store.load("small")

    return path.read_bytes(), load, layer.digest


def _foreign(directory: Path) -> tuple[bytes, Callable[[bytes], StoredLayer], None]:
    """A checkpoint in torch's own names; other values make another layer, so no digest is expected."""
    directory.mkdir()
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    shapes = {"in_proj_weight": (48, 16), "in_proj_bias": (48,), "out_proj.weight": (16, 16), "out_proj.bias": (16,)}
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}

    def load(content: bytes) -> StoredLayer:
        path.write_bytes(content)
        return import_layer(path, name="foreign", heads=4)

    return safetensors.torch.save(tensors), load, None


def _alarm(*_: object) -> None:
    raise Hang


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
