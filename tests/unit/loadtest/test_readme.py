"""The table of options in `loadtest/README.md` is the code's."""

import re
from pathlib import Path

from attention_load.options import OPTIONS, flag

README = Path(__file__).parents[3] / "loadtest" / "README.md"


def test_the_table_of_options_is_that_of_the_code():
    table = re.search(r"<!-- options -->\n(.*?)<!-- /options -->", README.read_text(encoding="utf-8"), re.DOTALL)
    assert table
    rows = [
        f"| `{flag(name)}` | `LOADTEST_{name.upper()}` | {f'`{default}`' if default != '' else ''} | {meaning} |"
        for name, default, meaning in OPTIONS
    ]
    assert table[1].splitlines()[2:] == [row.replace("|  |", "| |") for row in rows]
