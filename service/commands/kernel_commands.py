"""`compare` and `golden` commands: find the conventions of a kernel from its output, and write test vectors for kernels.

Invariant: The references of test vectors never come from the service, and the files are written before it is asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.commands.options import ApiKey, CommandFailed, Local, Url, console, service_url


def compare(
    case: Annotated[
        Path, typer.Argument(metavar="CASE", help="safetensors: query, key, value, output and perhaps mask")
    ],
    scale: Annotated[list[float] | None, typer.Option("--scale", help="try this scale too; may be repeated")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many readings to list, if fewer reproduce the output")] = 10,
    url: Url = None,
    api_key: ApiKey = None,
    local: Local = False,
) -> None:
    """Find the conventions of the kernel that computed an output.

    A reading is one combination of conventions. The metadata `request` (JSON) may fix layout, num_heads, num_kv_heads,
    scale, softcap and window. A reading reproduces the output if no number is off by more than a fraction of the output's
    largest magnitude: float64 1e-9, float32 1e-5, float16 4e-3, bfloat16 3e-2. Exit code 1 if none does.
    """
    from rich.table import Table

    from service.commands.asking import asking
    from service.commands.case_file import read_case, tolerance, widened
    from service.commands.readings import found_in, readings_of

    read = read_case(case)
    readings, output = readings_of(read, scale or []), read.tensors["output"]
    with asking(Path() if local else service_url(url), api_key) as ask:
        found = sorted(one for reading in readings for one in found_in(ask, reading, output.dtype))
    limit = tolerance(widened(output), output.dtype)
    count = sum(one.absolute <= limit for one in found)
    screen = console()
    screen.print(f"{case.name}, sha256 {read.sha256}", soft_wrap=True)
    screen.print(f"{count} of {len(found)} readings reproduce the {output.dtype} output within {limit:.3g}")
    table = Table("same", "max abs error", "max ULP", "reading", box=None, width=80)
    for one in found[: max(count, top)]:
        table.add_row("yes" if one.absolute <= limit else "no", f"{one.absolute:.3g}", f"{one.ulps:.3g}", one.words)
    screen.print(table)
    if not count:
        raise CommandFailed(
            f"no reading reproduces the output within {limit:.3g}; "
            f"the nearest, {found[0].words}, is off by {found[0].absolute:.3g}"
        )


def golden(
    out: Annotated[Path, typer.Option("--out", help="directory for the files; made if it is missing")],
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="seed of the inputs")] = 0,
    url: Url = None,
    api_key: ApiKey = None,
    local: Local = False,
) -> None:
    """Write test vectors for kernels, and compare the service with them.

    Exit code 1 if an answer is off by more than this fraction of its reference's largest magnitude: float64 1e-9,
    float32 1e-5, float16 4e-3, bfloat16 3e-2.
    """
    from service.commands.asking import asking
    from service.commands.case_file import errors, tolerance
    from service.commands.golden_vectors import VECTORS, golden_of

    made = [golden_of(vector, seed) for vector in VECTORS]
    for one in made:
        one.write(out, seed)
    screen, shares = console(), []
    with asking(Path() if local else service_url(url), api_key) as ask:
        for one in made:
            vector, reply = one.vector, ask(None, one.body())
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
