"""Reading request traces: Mooncake JSON lines and Azure CSV, told apart by what is in the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from swa_backend._math import cdiv
from swa_backend.errors import TraceError

BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
PACKAGED_TRACES = {"azure": "azure2023_conv_mid1000.csv", "mooncake": "mooncake_conversation_first300.jsonl"}

_MAX_ID = 2**62
_FORMATS = f"JSON lines with {', '.join(MOONCAKE_KEYS)}, or CSV with the header {','.join(AZURE_COLUMNS)}"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        id: number of the request among those read, from 0.
        line: line of the file, from 1.
        arrival: seconds since the first request of the file.
        input_length: prompt tokens.
        output_length: generated tokens, at least 1.
        blocks: content ids, one for each 512 prompt tokens; None when nothing is shared with another request.
    """

    id: int
    line: int
    arrival: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...] | None

    @property
    def total_length(self) -> int:
        return self.input_length + self.output_length


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file in its order, and how many rows were passed over."""

    path: str
    format: str
    requests: tuple[Request, ...]
    bad_rows: int


def packaged_trace(name: str = "azure") -> Path:
    """Path of a trace that ships with the library: ``azure`` (1000 requests) or ``mooncake`` (300)."""
    return Path(__file__).parent / "data" / PACKAGED_TRACES[name]


def resolve_trace(trace: str | Path | None) -> Path:
    """The file that is meant: a path, the name of a packaged trace, or the default packaged trace for None."""
    if trace is None:
        return packaged_trace()
    if str(trace) in PACKAGED_TRACES and not Path(trace).exists():
        return packaged_trace(str(trace))
    return Path(trace)


def read_trace(
    path: str | Path, *, max_requests: int | None = None, max_model_len: int | None = None, skip_bad_rows: bool = False
) -> Trace:
    """Read a trace.

    Args:
        path: the file.
        max_requests: stop after this many good rows; None reads all.
        max_model_len: longest prompt plus output that is accepted; None accepts any length.
        skip_bad_rows: pass over malformed and too long rows and count them, instead of raising.

    Raises:
        TraceError: the file cannot be read or is of neither format, or a row is malformed or too long.
    """
    text = _read_text(Path(path))
    lines = [line.rstrip("\r") for line in text.split("\n")]  # splitlines() would also split inside a row
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        name, rows = "mooncake", _mooncake_rows(lines)
    elif [cell.strip().lower() for cell in first.split(",")] == [column.lower() for column in AZURE_COLUMNS]:
        name, rows = "azure", _azure_rows(lines)
    else:
        raise TraceError(
            f"{path}:1",
            found=f"a first line {_shorten(first)!r}",
            legal=_FORMATS,
            fix="Convert the file to one of the two formats; the file name does not matter.",
        )

    requests: list[Request] = []
    bad_rows = 0
    origin: float | None = None
    for line, row in rows:
        if len(requests) == max_requests:
            break
        try:
            if isinstance(row, _BadRowError):
                raise _row_error(path, line, row)
            origin = row.arrival if origin is None else origin
            request = Request(
                len(requests), line, row.arrival - origin, row.input_length, row.output_length, row.blocks
            )
            _check_length(path, request, max_model_len)
        except TraceError:
            if not skip_bad_rows:
                raise
            bad_rows += 1
        else:
            requests.append(request)
    if not requests:
        raise TraceError(
            str(path),
            found=f"no usable request ({bad_rows} bad rows)",
            legal="at least one request",
            fix="Check the file; without --skip-bad-rows the first bad row is reported.",
        )
    return Trace(str(path), name, tuple(requests), bad_rows)


@dataclass(frozen=True, slots=True)
class _Row:
    arrival: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...] | None


class _BadRowError(Exception):
    """A row that cannot be used: the key, what was found, what is legal."""

    def __init__(self, key: str, found: str, legal: str) -> None:
        super().__init__(key)
        self.key, self.found, self.legal = key, found, legal


def _row_error(path: str | Path, line: int, bad: _BadRowError) -> TraceError:
    where = f"{path}:{line}" + (f": {bad.key}" if bad.key else "")
    return TraceError(
        where, found=bad.found, legal=bad.legal, fix="Correct the row, or pass --skip-bad-rows to read on and count it."
    )


def _check_length(path: str | Path, request: Request, max_model_len: int | None) -> None:
    if max_model_len is not None and request.total_length > max_model_len:
        raise TraceError(
            f"{path}:{request.line}: request length",
            found=f"{request.input_length} prompt + {request.output_length} generated = {request.total_length} tokens",
            legal=f"at most max_model_len = {max_model_len}",
            fix="Raise --max-model-len (up to the model's max_position_embeddings), or pass --skip-bad-rows.",
        )


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(
            str(path),
            found=error.strerror or str(error),
            legal="a readable file",
            fix=f"Check the path, or name a packaged trace: {', '.join(PACKAGED_TRACES)}.",
        ) from None
    if not data.strip():
        raise TraceError(str(path), found="an empty file", legal=_FORMATS, fix="Pass a trace that has requests.")
    try:
        if b"\0" in data:
            raise ValueError
        return data.decode("utf-8-sig")
    except ValueError:
        raise TraceError(
            str(path),
            found="binary data, or text that is not UTF-8",
            legal=_FORMATS,
            fix="Unpack the file if it is compressed, or save it as UTF-8.",
        ) from None


def _mooncake_rows(lines: list[str]) -> Iterator[tuple[int, _Row | _BadRowError]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, _mooncake_row(line)
            except _BadRowError as bad:
                yield number, bad


def _mooncake_row(line: str) -> _Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else "unreadable JSON"
        raise _BadRowError("", f"{_shorten(line)!r} ({message})", "one complete JSON object a line") from None
    if not isinstance(row, dict):
        raise _BadRowError("", f"a JSON {type(row).__name__}", "one JSON object a line")
    for key in MOONCAKE_KEYS:
        if key not in row:
            found = _shorten(", ".join(map(repr, row)))
            raise _BadRowError(key, f"no such key among {found}", ", ".join(MOONCAKE_KEYS))
    stamp = row["timestamp"]
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 1e18:
        raise _BadRowError("timestamp", _shorten(repr(stamp)), "milliseconds, a number from 0 to below 1e18")
    input_length = _positive("input_length", row["input_length"])
    output_length = _positive("output_length", row["output_length"])
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < _MAX_ID for i in ids):
        raise _BadRowError("hash_ids", _shorten(repr(ids)), "a list of integers from 0 to 2^62 - 1")
    blocks = cdiv(input_length, BLOCK_TOKENS)
    if len(ids) != blocks:
        raise _BadRowError(
            "hash_ids",
            f"{len(ids)} ids for input_length {input_length}",
            f"one id for each {BLOCK_TOKENS} tokens: {blocks}",
        )
    return _Row(stamp / 1000, input_length, output_length, tuple(ids))


def _azure_rows(lines: list[str]) -> Iterator[tuple[int, _Row | _BadRowError]]:
    header_seen = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not header_seen:
            header_seen = True
            continue
        try:
            yield number, _azure_row(line)
        except _BadRowError as bad:
            yield number, bad


def _azure_row(line: str) -> _Row:
    try:
        cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise _BadRowError("", f"{_shorten(line)!r} ({error})", ",".join(AZURE_COLUMNS)) from None
    if len(cells) != len(AZURE_COLUMNS):
        raise _BadRowError("", f"{len(cells)} columns in {_shorten(line)!r}", f"3 columns: {','.join(AZURE_COLUMNS)}")
    try:
        # Read as UTC whatever it says: only differences matter.
        arrival = datetime.fromisoformat(cells[0].replace("Z", "")).replace(tzinfo=None)
    except ValueError:
        legal = "a date and time, YYYY-MM-DD HH:MM:SS.ffffff"
        raise _BadRowError("TIMESTAMP", _shorten(repr(cells[0])), legal) from None
    lengths = []
    for column, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True):
        try:
            # int() also takes '1_000' and other scripts' digits.
            value = int(cell) if cell.isascii() and cell.lstrip("-").isdigit() else None
        except ValueError:
            value = None
        lengths.append(_positive(column, cell if value is None else value))
    return _Row((arrival - datetime(1970, 1, 1)).total_seconds(), lengths[0], lengths[1], None)


def _positive(key: str, value: object) -> int:
    if type(value) is not int or not 0 < value < _MAX_ID:
        raise _BadRowError(key, _shorten(repr(value)), "a whole number of tokens, from 1 to 2^62 - 1")
    return value


def _shorten(text: str, limit: int = 60) -> str:
    """The text on one line, cut to ``limit`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit] + "..."
