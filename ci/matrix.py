"""The platform matrix, read and checked; the standard library alone, so that any Python 3.11 can list it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MATRIX: Mapping[str, Any] = tomllib.loads((ROOT / "ci" / "matrix.toml").read_text())
PLATFORMS = ("cpu", "cuda", "rocm", "any")


@dataclass(frozen=True, slots=True)
class Run:
    """Something that rows run.

    Attributes:
        name: its name.
        about: what it shows.
        pytest: arguments of pytest, empty without a pytest step.
        short: further ones for the part that every CI run takes.
        command: arguments of Python, empty without such a step; once a target where they name ``{target}``.
        short_command: further ones for the short part.
        needs: ``gpu``, ``simulator`` or None.
        bare: that it makes an environment by itself and needs none with the library in it.
    """

    name: str
    about: str
    pytest: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    short_command: tuple[str, ...] = ()
    needs: str | None = None
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row; None where something does not matter to it.

    Attributes:
        name: its name.
        runs: what it runs.
        platform: ``cpu``, ``cuda``, ``rocm`` or ``any``.
        arch: machines (``x86_64``) or GPU targets (``cuda:90``) that it is for.
        gpu: part of the name of the GPU.
        python, torch, triton: versions; ``none`` is without Triton.
        targets: chips that are compiled for or simulated.
        runner: labels of the machine that a workflow asks for; empty: no workflow runs it.
        minutes: when a workflow gives up.
    """

    name: str
    runs: tuple[str, ...]
    platform: str
    arch: tuple[str, ...] = ()
    gpu: str | None = None
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    targets: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()
    minutes: int = 60

    @property
    def about(self) -> str:
        """What its runs show."""
        return "; ".join(RUNS[name].about for name in self.runs)

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions that it is for."""
        wanted = {"python": self.python, "torch": self.torch, "triton": self.triton}
        return {name: version for name, version in wanted.items() if version is not None}


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def read(matrix: Mapping[str, Any]) -> tuple[dict[str, Run], dict[str, Row]]:
    """Runs and rows by name.

    Raises:
        ValueError: a row is named twice, or names a run, platform or key that there is not.
    """
    runs = {name: Run(name, **_tuples(values)) for name, values in matrix["run"].items()}
    rows: dict[str, Row] = {}
    for values in matrix["row"]:
        try:
            row = Row(**_tuples(values))
        except TypeError as error:
            raise ValueError(f"row {values.get('name')!r}: {error}") from None
        if row.name in rows:
            raise ValueError(f"row {row.name!r} twice")
        if unknown := [name for name in row.runs if name not in runs]:
            raise ValueError(f"row {row.name!r}: no run {unknown[0]!r}")
        if row.platform not in PLATFORMS:
            raise ValueError(f"row {row.name!r}: no platform {row.platform!r}")
        rows[row.name] = row
    return runs, rows


RUNS, ROWS = read(MATRIX)
