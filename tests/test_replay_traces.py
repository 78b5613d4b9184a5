"""Reading traces: both formats, told apart by content; every bad row is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swa_backend.errors import TraceError
from swa_backend.replay.traces import packaged_trace, read_trace, resolve_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def azure_row(prompt: object = 100, output: object = 5, stamp: str = "2023-11-16 18:15:46.6805900") -> str:
    return f"{stamp},{prompt},{output}"


def mooncake_row(drop: str = "", **changes: object) -> str:
    row = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [3, 9], **changes}
    return json.dumps({key: value for key, value in row.items() if key != drop})


def write(path: Path, *lines: str, newline: str = "\n") -> Path:
    path.write_bytes((newline.join(lines) + newline).encode())
    return path


class TestPackaged:
    def test_azure(self):
        trace = read_trace(packaged_trace())
        assert (trace.format, trace.bad_rows, len(trace.requests)) == ("azure", 0, 1000)
        first, second = trace.requests[:2]
        assert (first.id, first.line, first.arrival, first.input_length, first.output_length) == (0, 2, 0.0, 4099, 69)
        assert (second.id, second.line, second.total_length, second.blocks) == (1, 3, 823, None)
        assert second.arrival == pytest.approx(0.022586, abs=1e-6)

    def test_mooncake(self):
        trace = read_trace(packaged_trace("mooncake"))
        assert (trace.format, trace.bad_rows, len(trace.requests)) == ("mooncake", 0, 300)
        second = trace.requests[1]
        assert (second.line, second.input_length, second.output_length) == (2, 7322, 490)
        assert second.blocks == (0, *range(14, 28))

    def test_resolve(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert resolve_trace(None) == packaged_trace("azure")
        assert resolve_trace("mooncake") == packaged_trace("mooncake")
        assert resolve_trace("other.csv") == Path("other.csv")
        (tmp_path / "azure").write_text("")
        assert resolve_trace("azure") == Path("azure")  # a file that is there wins over the packaged name


class TestFormats:
    def test_told_apart_by_content_not_by_name(self, tmp_path):
        jsonl = write(tmp_path / "trace.csv", mooncake_row())
        table = write(tmp_path / "trace.jsonl", HEADER, azure_row())
        assert read_trace(jsonl).format == "mooncake"
        assert read_trace(table).format == "azure"

    def test_line_ends_blank_lines_byte_order_mark_and_spaces(self, tmp_path):
        path = tmp_path / "trace"
        lines = ("", HEADER.lower(), "", azure_row(" 7", "8 "), "", azure_row(9, 1))
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
        assert [(r.line, r.input_length, r.output_length) for r in read_trace(path).requests] == [(4, 7, 8), (6, 9, 1)]

    def test_arrival_is_relative_and_in_seconds(self, tmp_path):
        path = write(tmp_path / "t", mooncake_row(timestamp=1500), mooncake_row(timestamp=4000))
        assert [request.arrival for request in read_trace(path).requests] == [0.0, 2.5]
        stamps = ("2024-02-28 23:59:59.5", "2024-02-29 00:00:01")
        path = write(tmp_path / "t", HEADER, *(azure_row(stamp=stamp) for stamp in stamps))
        assert [request.arrival for request in read_trace(path).requests] == [0.0, 1.5]

    def test_max_requests_stops_before_what_follows_is_read(self, tmp_path):
        path = write(tmp_path / "t", HEADER, azure_row(1), azure_row(2), "rubbish")
        assert [request.input_length for request in read_trace(path, max_requests=2).requests] == [1, 2]


BAD_AZURE = {
    "too few columns": ("2023-11-16 18:15:46,5", "2 columns"),
    "too many columns": (azure_row() + ",1", "4 columns"),
    "no date": (azure_row(stamp="yesterday"), "TIMESTAMP: found 'yesterday'"),
    "zero prompt": (azure_row(0), "ContextTokens: found 0"),
    "negative prompt": (azure_row(-4), "ContextTokens: found -4"),
    "fraction": (azure_row("1.5"), "ContextTokens: found '1.5'"),
    "underscore": (azure_row("1_000"), "ContextTokens: found '1_000'"),
    "foreign digits": (azure_row("١٢"), "ContextTokens: found '١٢'"),
    "empty output": (azure_row(5, ""), "GeneratedTokens: found ''"),
    "zero output": (azure_row(5, 0), "GeneratedTokens: found 0"),
    "huge": (azure_row("9" * 5000), "ContextTokens: found '999"),
    "open quote": ('"2023-11-16 18:15:46,5,5', "found"),
    "header again": (HEADER, "TIMESTAMP"),
}
BAD_MOONCAKE = {
    "no JSON": ("{nonsense", "one complete JSON object a line"),
    "a list": ("[1, 2]", "a JSON list"),
    "missing key": (mooncake_row(drop="output_length"), "output_length: found no such key"),
    "negative time": (mooncake_row(timestamp=-1), "timestamp: found -1"),
    "text time": (mooncake_row(timestamp="0"), "timestamp: found '0'"),
    "bool length": (mooncake_row(input_length=True), "input_length: found True"),
    "zero output": (mooncake_row(output_length=0), "output_length: found 0"),
    "too few ids": (mooncake_row(hash_ids=[1]), "hash_ids: found 1 ids for input_length 600"),
    "too many ids": (mooncake_row(hash_ids=[1, 2, 3]), "3 ids"),
    "negative id": (mooncake_row(hash_ids=[1, -2]), "hash_ids: found [1, -2]"),
    "ids no list": (mooncake_row(hash_ids=7), "hash_ids: found 7"),
    "huge id": (mooncake_row(hash_ids=[1, 2**62]), "from 0 to 2^62 - 1"),
    "huge length": (mooncake_row(input_length=2**62), "from 1 to 2^62 - 1"),
    "late": (mooncake_row(timestamp=1e18), "below 1e18"),
    "escape in a key": ('{"\\u001b[31m": 1}', r"among '\x1b[31m'"),
    "deep": ("[" * 100000, "unreadable JSON"),
}


class TestBadRows:
    @pytest.mark.parametrize("row", BAD_AZURE)
    def test_azure(self, tmp_path, row):
        text, said = BAD_AZURE[row]
        self.check(write(tmp_path / "t", HEADER, azure_row(), "", text, azure_row()), 4, said)

    @pytest.mark.parametrize("row", BAD_MOONCAKE)
    def test_mooncake(self, tmp_path, row):
        text, said = BAD_MOONCAKE[row]
        self.check(write(tmp_path / "t", mooncake_row(), text, mooncake_row()), 2, said)

    def check(self, path: Path, line: int, said: str) -> None:
        with pytest.raises(TraceError) as raised:
            read_trace(path)
        assert raised.value.field.startswith(f"{path}:{line}")
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500
        trace = read_trace(path, skip_bad_rows=True)
        assert (len(trace.requests), trace.bad_rows) == (2, 1)
        assert [request.id for request in trace.requests] == [0, 1]

    def test_request_longer_than_max_model_len(self, tmp_path):
        path = write(tmp_path / "t", HEADER, azure_row(90, 10), azure_row(90, 11))
        with pytest.raises(TraceError) as raised:
            read_trace(path, max_model_len=100)
        assert raised.value.field == f"{path}:3: request length"
        assert raised.value.found == "90 prompt + 11 generated = 101 tokens"
        assert raised.value.legal == "at most max_model_len = 100"
        assert read_trace(path, max_model_len=100, skip_bad_rows=True).bad_rows == 1
        assert read_trace(path, max_model_len=101).bad_rows == 0


class TestUnusableFiles:
    @pytest.mark.parametrize(
        ("content", "found"),
        [
            (b"", "an empty file"),
            (b" \n\n", "an empty file"),
            (b"\x1f\x8b\x08\x00\x00", "binary data, or text that is not UTF-8"),
            (b"\xff\xfe\xff", "binary data, or text that is not UTF-8"),
            ((HEADER + "\nn\xe9e,1,2\n").encode("latin-1"), "binary data, or text that is not UTF-8"),
            (b"a,b,c\n1,2,3\n", "a first line 'a,b,c'"),
            (HEADER.encode(), "no usable request (0 bad rows)"),
        ],
    )
    def test_content(self, tmp_path, content, found):
        path = tmp_path / "t"
        path.write_bytes(content)
        with pytest.raises(TraceError) as raised:
            read_trace(path)
        assert raised.value.found == found
        assert str(path) in raised.value.field

    def test_missing_file_and_folder(self, tmp_path):
        for path in (tmp_path / "none.csv", tmp_path):
            with pytest.raises(TraceError, match="a readable file"):
                read_trace(path)

    def test_only_bad_rows(self, tmp_path):
        path = write(tmp_path / "t", HEADER, azure_row(0), azure_row(0))
        with pytest.raises(TraceError, match="no usable request \\(2 bad rows\\)"):
            read_trace(path, skip_bad_rows=True)


lengths = st.integers(1, 3000)
bad = st.sampled_from(["", "0", "-1", "x", "2.0"])


@given(
    rows=st.lists(st.one_of(st.tuples(lengths, lengths), st.tuples(bad, lengths), st.tuples(lengths, bad)), min_size=1),
    mooncake=st.booleans(),
)
def test_any_mix_of_rows(tmp_path_factory, rows, mooncake):
    """Good rows come out in order with their lines, the first bad one is reported, all bad ones are counted."""
    good = [(line, *row) for line, row in enumerate(rows) if all(isinstance(value, int) for value in row)]
    bad_lines = [line for line, row in enumerate(rows) if any(not isinstance(value, int) for value in row)]
    if mooncake:
        lines = [
            mooncake_row(input_length=p, output_length=o, hash_ids=[1] * (-(-p // 512) if isinstance(p, int) else 1))
            for p, o in rows
        ]
        first_line = 1
    else:
        lines = [HEADER, *(azure_row(p, o) for p, o in rows)]
        first_line = 2
    path = write(tmp_path_factory.mktemp("mix") / "t", *lines)
    if bad_lines:
        with pytest.raises(TraceError) as raised:
            read_trace(path)
        assert raised.value.field.startswith(f"{path}:{bad_lines[0] + first_line}:")
    if good:
        trace = read_trace(path, skip_bad_rows=True)
        found = [(r.line - first_line, r.input_length, r.output_length) for r in trace.requests]
        assert found == good
        assert trace.bad_rows == len(bad_lines)
