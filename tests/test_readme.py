"""What the README shows is run here as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int) -> None:
    environment = {**os.environ, "SWA_BACKEND_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[number]], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_is_an_example_and_there_are_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert EXAMPLES
    assert len(re.findall(r"^```sh$", text, re.MULTILINE)) == 2
