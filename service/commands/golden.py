"""`golden` command: writes test vectors for attention kernels, and compares the service's answers with their references.

Invariant: The references never come from the service, and the files are written before it is asked.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service import __version__
from service.commands.options import ApiKey, CommandFailed, Local, Url, console, service_url
from service.errors import InvalidInput

if TYPE_CHECKING:
    from service.commands.golden_vectors import Golden, Vector

Out = Annotated[Path, typer.Option("--out", help="directory for the files; made if it is missing")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="seed of the inputs")]


def golden(out: Out, seed: Seed = 0, url: Url = None, api_key: ApiKey = None, local: Local = False) -> None:
    """Write test vectors for kernels, and compare the service with them.

    Exit code 1 if an answer is off by more than this fraction of its reference's largest magnitude: float64 1e-9,
    float32 1e-5, float16 4e-3, bfloat16 3e-2.
    """
    from service.commands.asking import asking
    from service.commands.case_file import errors, tolerance
    from service.commands.golden_vectors import VECTORS, golden_of

    made = [(vector, golden_of(vector, seed)) for vector in VECTORS]
    for vector, one in made:
        _write(out / f"{vector.name}.safetensors", vector, one, seed)
    screen, shares = console(), []
    with asking(Path() if local else service_url(url), api_key) as ask:
        for vector, one in made:
            reply = ask(None, one.body())
            lse_dtype = "float64" if vector.dtype == "float64" else "float32"
            for name, reference, dtype in (("output", one.output, vector.dtype), ("lse", one.lse, lse_dtype)):
                error, ulps = errors(reply.array(name, reference.shape).astype(float), reference, dtype)
                shares.append((error / tolerance(reference, dtype), f"{name} of {vector.name}"))
                screen.print(f"{vector.name:20} {name:6} max abs error {error:8.3g}, max ULP {ulps:.3g}")
    share, where = max(shares)
    text = f"{len(made)} vectors in {out}; the largest error is {share:.3g} of its tolerance, {where}"
    screen.print(text, soft_wrap=True)
    if share > 1:
        raise CommandFailed(f"the service's {where} is off by {share:.3g} times the tolerance")


def _write(path: Path, vector: Vector, made: Golden, seed: int) -> None:
    """Write inputs and references. The metadata is one key, because the library orders several keys at random."""
    import numpy as np
    import orjson

    from attention_client.safetensors_body import write
    from service.commands.case_file import rounded

    data = b"".join(made.inputs[name].bits.tobytes() for name in sorted(made.inputs))
    about = {
        "name": vector.name,
        "description": made.description,
        "request": made.request,
        "seed": seed,
        "sha256": hashlib.sha256(data).hexdigest(),
        "made_by": {"attention-service": __version__, "numpy": np.__version__},
    }
    references = {"output": rounded(made.output, "float64"), "lse": rounded(made.lse, "float64")}
    content = write(made.inputs | references, {"golden": orjson.dumps(about).decode()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
