"""docs/faq.md as its reader follows it: each command is answered as the page says."""

import re
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
ASKED = re.findall(r"## ([^\n]*)\n(?:(?!\n## ).)*?```bash\n(.*?)\n```\n\nAnswer: `(.*?)`\n", PAGE, re.DOTALL)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_every_command_of_the_page_has_an_answer():
    assert len(ASKED) == PAGE.count("```bash") >= 5


@pytest.mark.parametrize(("question", "command", "words"), ASKED, ids=[question[:24] for question, _, _ in ASKED])
def test_a_command_is_answered_as_the_page_says(url, question, command, words):
    assert "\n" not in command, question
    ran = subprocess.run(
        command.replace("http://127.0.0.1:8000", url),
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert words in ran.stdout
