#!/usr/bin/env python3
"""What someone does who just found this: every command of the README, word for word, in a copy of the sources.

``tests/newcomer.py [--list] [--keep]``. Commands stand between ```sh and ``` (a block is one command) and after ``$ ``
between ```console and ```. The first one makes the environment; its programs are on the path of those after it.
Exit status 1 if a command fails: nothing after it is run. Not among the ordinary tests, since it installs everything
anew and runs them all: it is the row `newcomer` of the platform matrix.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What a shell has before anything is set up, and what says how packages are reached.
KEPT = re.compile(r"HOME|USER|LANG|LC_.*|TERM|TMPDIR|PIP_.*|SSL_.*|.*_(CA_BUNDLE|PROXY)|.*_proxy|PYENV_.*")


def commands(readme: str) -> list[str]:
    """The README's commands in their order."""
    found = []
    for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
        found += [block.strip()] if kind == "sh" else re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    return found


def copy_sources(target: Path) -> None:
    """The files that a clone would have, changes included; the sources have to be a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def environment(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The given variables without those that could help, and the programs of the folder's environment first."""
    kept = {name: value for name, value in given.items() if KEPT.fullmatch(name)}
    path = given.get("PATH", os.defpath)
    if own := given.get("VIRTUAL_ENV") or (sys.prefix if sys.prefix != sys.base_prefix else None):
        path = os.pathsep.join(part for part in path.split(os.pathsep) if Path(part) != Path(own) / "bin")
    return {**kept, "PATH": os.pathsep.join([str(folder / ".venv" / "bin"), path])}


def follow(todo: Sequence[str], folder: Path) -> int:
    """Run commands in a folder until one fails."""
    variables = environment(folder, os.environ)
    for number, command in enumerate(todo, 1):
        print(f"--- command {number} of {len(todo)}\n$ {command}", flush=True)
        start = time.monotonic()
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=variables, check=False)
        seconds = time.monotonic() - start
        if done.returncode:
            print(f"--- command {number} FAILED with exit code {done.returncode} after {seconds:.0f} s", flush=True)
            return 1
        print(f"--- command {number} is fine, {seconds:.0f} s", flush=True)
    print(f"--- all {len(todo)} commands of the README work")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    parser.add_argument("--keep", action="store_true", help="leave the copy where it is")
    options = parser.parse_args()
    if not (ROOT / ".git").exists():
        parser.error(f"{ROOT} is no git checkout, so nothing says which files belong to it")
    todo = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    if options.list:
        print("\n".join(todo))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        copy_sources(folder)
        return follow(todo, folder)
    finally:
        if options.keep:
            print(f"--- left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
