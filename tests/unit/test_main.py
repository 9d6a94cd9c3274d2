"""The command line begins with three open streams, whatever it was started with."""

import subprocess
import sys

import pytest

WHERE = """
import os, sys
from service.__main__ import _open_streams
_open_streams()
places = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
print(places, [os.get_inheritable(number) for number in range(3)], file=open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("closed", [(), (1,), (2,), (1, 2), (0, 1, 2)])
def test_a_closed_standard_stream_is_replaced_by_devnull_here_and_in_children(tmp_path, closed):
    told, given = tmp_path / "told", tmp_path / "given"
    given.touch()
    ends = " ".join(f"{number}>&-" for number in closed)
    command = f'exec "$0" -c "$1" "$2" <"$3" >"$3" 2>"$3" {ends}'
    subprocess.run(["/bin/sh", "-c", command, sys.executable, WHERE, told, given], check=True)
    places = ["/dev/null" if number in closed else str(given) for number in range(3)]
    assert told.read_text() == f"{places} {[True] * 3}\n"
