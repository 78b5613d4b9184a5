"""``swa-backend doctor``: print what is installed, what is usable, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swa_backend.cli import EXIT_USAGE, complain
from swa_backend.commands.options import JsonOption, PlatformOption, TargetOption
from swa_backend.commands.output import show, write_json
from swa_backend.commands.targets import backend_for
from swa_backend.doctor import BackendReport, Report, examine

if TYPE_CHECKING:
    from swa_backend.integrations.vllm.doctor import VllmReport

VllmOption = Annotated[bool, typer.Option("--vllm", help="Also import the installed vLLM, and look at its plugin.")]


def doctor(
    platform: PlatformOption = None, target: TargetOption = None, json: JsonOption = False, vllm: VllmOption = False
) -> None:
    """Show versions, devices, every platform and every attention provider, with the reasons for and against each.

    Exit status 2 if no platform could be chosen, because SWA_BACKEND_PLATFORM names one that cannot be used here, or if
    SWA_BACKEND_ATTENTION names a provider that there is not; with --vllm also if vLLM would not run as SWA_BACKEND_VLLM
    asks.
    """
    if target is not None and platform is None:
        platform = backend_for(target, None).name
    report = examine(platform, target)
    engine = _examine_vllm() if vllm else None
    if json:
        write_json(report.to_dict() if engine is None else {**report.to_dict(), "vllm": engine.to_dict()})
    else:
        tables = [_summary(report), _platforms(report), *(_providers(backend) for backend in report.backends)]
        show(*tables, *([] if engine is None else [_vllm(engine)]))
    found = (report.error, report.problem_of_forced_provider(), engine.problem if engine is not None else None)
    problems = [one for one in found if one is not None]
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(EXIT_USAGE)


def _examine_vllm() -> VllmReport:
    from swa_backend.integrations.vllm.doctor import examine_vllm

    return examine_vllm()


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


def _vllm(report: VllmReport) -> Table:
    supported = ", ".join(f"{series}.x" for series in report.supported)
    table = Table(title=f"vLLM {escape(report.version)} (made for {supported})", title_justify="left")
    for heading in ("what", "verdict", "replaces"):
        table.add_column(heading, overflow="fold")
    table.add_row("plugin", escape("\n".join(report.plugin)) or "vLLM loads it", "")
    for mode, reasons in report.modes.items():
        asked = " (asked for)" if mode == (report.requested or "").lower() else ""
        verdict = escape("\n".join(reasons)) or "can be switched on"
        forwards = [one.partition(".models.")[2] for one in report.replaces[mode] if one.endswith("forward_mqa")]
        builders = f"{len(report.replaces[mode]) - len(forwards)} window metadata builders (--json names them)"
        table.add_row(f"{mode}{asked}", verdict, escape("\n".join((builders, *forwards))))
    return table
