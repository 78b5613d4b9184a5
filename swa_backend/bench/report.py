"""Saved bench reports: reading them back, and what a row of one holds.

A file holds one report, ``{"what": .., "gpu": .., "torch": .., "triton": .., "date": .., "cases": [row, ..]}``, or
several, ``{"reports": [report, ..]}``. A row has a ``case`` and, for each contender (``ours``, ``peer``, ..), the times
of `swa_backend.bench.timing.Timing` in microseconds a call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swa_backend.errors import ConfigError

OURS, PEER = "ours", "peer"
MACHINE = ("gpu", "torch", "triton")

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def as_file(reports: Sequence[Report]) -> Report:
    """What is written: one report as it is, several under ``reports``."""
    return reports[0] if len(reports) == 1 else {"reports": list(reports)}


def read_reports(path: Path) -> tuple[Report, ...]:
    """The reports of a file.

    Raises:
        ConfigError: it cannot be read, is no JSON, or holds no report.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refuse(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _refuse(path, f"no JSON ({error})") from None
    reports = data.get("reports", [data]) if isinstance(data, dict) else data
    if not isinstance(reports, list) or not reports:
        raise _refuse(path, f"a JSON {type(data).__name__} without reports")
    for report in reports:
        _check(path, report)
    return tuple(reports)


def contenders(row: Row) -> Iterator[tuple[str, Mapping[str, float]]]:
    """(name, times) of everything that a row timed, ours first."""
    found = {name: times for name, times in row.items() if isinstance(times, Mapping) and "gpu" in times}
    yield from sorted(found.items(), key=lambda item: item[0] != OURS)


def ratio(row: Row, metric: str, who: str = OURS) -> float | None:
    """The peer's time over that of ``who``; above 1 the peer is slower. None where either is missing or is zero."""
    times = dict(contenders(row))
    mine, theirs = times.get(who, {}).get(metric), times.get(PEER, {}).get(metric)
    return theirs / mine if mine and theirs else None


def describe(report: Report) -> str:
    """What was measured on what, in one line."""
    return f"{report['what']} on {', '.join(report.get(name, '?') for name in MACHINE)}, {report.get('date', '?')}"


def _check(path: Path, report: Any) -> None:
    if not isinstance(report, dict) or not isinstance(report.get("what"), str):
        raise _refuse(path, "a report without 'what'")
    cases = report.get("cases")
    if not isinstance(cases, list):
        raise _refuse(path, f"the report {report['what']!r} without a list 'cases'")
    for name in (*MACHINE, "date"):
        if not isinstance(report.get(name, ""), str):
            raise _refuse(path, f"the report {report['what']!r} with a {name} that is no text")
    for number, row in enumerate(cases):
        where = f"case {number} of the report {report['what']!r}"
        if not isinstance(row, dict) or not isinstance(row.get("case"), str):
            raise _refuse(path, f"{where} without a name")
        if OURS not in dict(contenders(row)):
            raise _refuse(path, f"{where} ({row['case']!r}) without times of {OURS!r}")
        for who, times in contenders(row):
            for metric, value in times.items():
                if value is not None and not _is_time(value):
                    raise _refuse(path, f"{where} ({row['case']!r}) where {who} has {metric} = {value!r}")


def _is_time(value: object) -> bool:
    """Whether it is a number of microseconds: finite, and one that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= sys.float_info.max  # not NaN either


def _refuse(path: Path, found: str) -> ConfigError:
    return ConfigError(
        str(path),
        found=found,
        legal="a file that `swa-backend bench .. --output FILE` wrote",
        fix="Pass such a file, whole.",
    )
