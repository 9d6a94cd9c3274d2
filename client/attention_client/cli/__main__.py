"""Entry point: `attention` and `python -m attention_client.cli` start the command line, or say which extra is missing."""

from __future__ import annotations

import sys

_EXTRA = {"rich", "typer"}


def main() -> None:
    try:
        from attention_client.cli.app import main as run  # noqa: PLC0415 (without the extra, it cannot be imported)
    except ModuleNotFoundError as error:
        if (missing := str(error.name).partition(".")[0]) not in _EXTRA:
            raise
        sys.exit(f"attention: {missing} is missing: pip install 'attention-service-client[cli]'")
    run()


if __name__ == "__main__":
    main()
