"""``swa-backend doctor``: print what is installed, what is usable, and why."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.cli import EXIT_USAGE, complain
from swa_backend.commands.options import JsonOption, PlatformOption, TargetOption
from swa_backend.commands.output import show, write_json
from swa_backend.commands.targets import backend_for
from swa_backend.doctor import BackendReport, Report, examine


def doctor(platform: PlatformOption = None, target: TargetOption = None, json: JsonOption = False) -> None:
    """Show versions, devices, every platform and every attention provider, with the reasons for and against each.

    Exit status 2 if no platform could be chosen, because SWA_BACKEND_PLATFORM names one that cannot be used here.
    """
    if target is not None and platform is None:
        platform = backend_for(target, None).name
    report = examine(platform, target)
    if json:
        write_json(report.to_dict())
    else:
        show(_summary(report), _platforms(report), *(_providers(backend) for backend in report.backends))
    if report.error is not None:
        complain(report.error)
        raise typer.Exit(EXIT_USAGE)


def _summary(report: Report) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(report):
        table.add_row(name, escape(value))
    return table


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "platform", report.chosen or "none could be chosen"
    if report.why is not None:
        yield "why", report.why
    for name, version in report.versions.items():
        yield name, version or "not installed"
    yield (
        "torch built for",
        ", ".join(f"{name} {version}" for name, version in report.torch_build.items()) or "CPU only",
    )
    yield from ((name, repr(value)) for name, value in report.environment.items())
    yield "devices", "\n".join(report.devices) or "none"


def _platforms(report: Report) -> Table:
    table = Table(title="Platforms", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("from", overflow="fold")
    table.add_column("here", overflow="fold")
    table.add_column("reasons", overflow="fold")
    for one in report.platforms:
        verdict = "chosen" if one.name == report.chosen and one.usable else "usable" if one.usable else "not usable"
        table.add_row(escape(one.name), escape(one.origin), verdict, escape("\n".join(one.reasons)))
    return table


def _providers(backend: BackendReport) -> Table:
    place = backend.platform if backend.target is None else f"{backend.platform} for {backend.target}"
    table = Table(title=f"Attention providers of {escape(place)}", title_justify="left")
    for heading in ("provider", "model", "verdict"):
        table.add_column(heading, overflow="fold")
    for provider in backend.providers:
        for model, reasons in provider.models.items():
            table.add_row(escape(provider.name), escape(model), escape("\n".join(reasons)) or "serves it")
    if not backend.providers:
        table.add_row("none", "", escape(backend.problem or "the platform supplies none"))
    return table
