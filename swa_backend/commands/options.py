"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

PlatformOption = Annotated[
    str | None, typer.Option("--platform", metavar="NAME", help="Platform to use instead of the one chosen at import.")
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", metavar="VENDOR:ARCH", help="Chip to build for, without probing this machine."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
