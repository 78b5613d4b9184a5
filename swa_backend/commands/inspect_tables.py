"""The tables of ``swa-backend inspect``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from swa_backend.inspect.report import PagesView, StepReport, TokenView

MAX_REQUESTS = 40
MAX_PAGES = 12


def tables(report: StepReport, rows: int) -> Iterator[Table | str]:
    """Everything there is to show; ``rows`` limits the table of tokens, 0 shows all."""
    yield _summary(report)
    yield _requests(report)
    yield _rows(report, rows or len(report.tokens))
    yield _pages(report)
    yield _chunks(report)
    yield _layers(report)
    if report.validation is not None:
        yield escape(f"Validation would refuse this step: {report.validation}")
    yield from (escape(f"WRONG: {problem}") for problem in report.problems)


def _table(title: str, headings: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    return table


def _summary(report: StepReport) -> Table:
    facts, split = report.facts, report.facts["split"]
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    pages = "not known" if facts["num_pages"] is None else facts["num_pages"]
    for name, value in (
        ("step", facts["source"]),
        ("model", f"{facts['model']}, window {facts['window']}"),
        ("platform", f"{facts['platform']}, attention by {facts['provider']}"),
        ("split", f"{split['decodes']} decodes of {split['decode_tokens']} tokens, {split['prefills']} prefills of "
                  f"{split['prefill_tokens']} tokens, {split['padding']} of them padding; a query of up to "
                  f"{split['decode_threshold']} tokens is a decode"),
        ("row widths", f"decode {facts['decode_width']}, prefill {facts['prefill_width']}"),
        ("order", "causal" if facts["causal"] else "non-causal draft step"),
        ("pages", f"of {facts['page_tokens']} tokens; in the window cache: {pages}"),
        ("prefill workspace", f"at most {facts['workspace_bytes']:,} bytes"),
    ):  # fmt: skip
        table.add_row(name, escape(str(value)))
    return table


def _requests(report: StepReport) -> Table:
    table = _table("Requests", ("request", "part", "tokens", "positions", "keys in the window cache", "more"),
                   ("request", "tokens"))  # fmt: skip
    for one in report.requests[:MAX_REQUESTS]:
        more = [f"images {', '.join(f'{a}-{b}' for a, b in one.images)}"] if one.images else []
        more += [f"replays from {one.replay_start}"] if one.replay_start else []
        more += [f"gathers {one.gathered} keys"] if one.gathered is not None else []
        table.add_row(
            str(one.request), one.part, str(one.tokens), _span(one.first_position, one.last_position),
            _span(one.first_key, one.last_key), "; ".join(more),
        )  # fmt: skip
    _left_out(table, len(report.requests) - MAX_REQUESTS, "requests")
    return table


def _rows(report: StepReport, limit: int) -> Table:
    compressed = [kind.value for kind in report.entries]
    plain = all(set(token.keys) <= {"window"} for token in report.tokens)  # then the length says it all
    table = _table(
        "Rows", ("token", "req.", "at", "part", "len", "keys", "slots", *(() if plain else ("of these",)), *compressed),
        ("token", "req.", "at", "len", *compressed),
    )  # fmt: skip
    table.columns[3].min_width = len("prefill")
    for token in _ends_of_requests(report.tokens, limit):
        if token is None:
            table.add_row("..")
            continue
        known = {kind.value: bool(own.known[token.token]) for kind, own in report.entries.items()}
        table.add_row(
            str(token.token), _number(token.request), _number(token.position), token.part, str(token.len),
            _span(token.first_key, token.last_key), _span(token.first_slot, token.last_slot, " .. "),
            *(() if plain else (", ".join(f"{n} {key}" for key, n in token.keys.items()),)),
            *(f"{'' if known[kind] else '<= '}{n}" for kind, n in token.entries.items()),
        )  # fmt: skip
    return table


def _ends_of_requests(tokens: Sequence[TokenView], limit: int) -> Iterator[TokenView | None]:
    """At most about ``limit`` tokens: all, or the first and last of each request, None where some are left out."""
    if len(tokens) <= limit:
        yield from tokens
        return
    shown = 0
    for _, group in groupby(tokens, lambda token: token.request):
        own = list(group)
        if shown >= limit:
            yield None
            return
        ends = own if len(own) <= 4 else [*own[:2], None, *own[-2:]]
        shown += min(len(own), 4)
        yield from ends


def _pages(report: StepReport) -> Table:
    table = _table("Pages that the step reads or writes", ("group", "request", "page", "columns", "pages", "missing"),
                   ("request",))  # fmt: skip
    shown = 0
    for _, group in groupby(report.pages, lambda one: one.group):
        own = list(group)
        for one in own[:MAX_REQUESTS]:
            shown += 1
            size = f"{one.page_tokens} tokens"
            if one.entries_per_page != one.page_tokens:
                size += f", {one.entries_per_page} entries"
            table.add_row(
                one.group, str(one.request), size, _span(one.first_column, one.first_column + len(one.pages) - 1),
                _page_list(one), _some([f"column {column}" for column in one.without_page]),
            )  # fmt: skip
    _left_out(table, len(report.pages) - shown, "rows")
    return table


def _page_list(one: PagesView) -> str:
    return _some([str(page) for page in one.pages])


def _some(items: Sequence[str]) -> str:
    if len(items) > MAX_PAGES:
        items = [*items[: MAX_PAGES - 2], f".. {len(items) - MAX_PAGES + 1} more ..", items[-1]]
    return ", ".join(items)


def _chunks(report: StepReport) -> Table | str:
    if not report.chunks:
        return "No chunk plan: the step has no prefill tokens."
    table = _table(
        "Chunk plan", ("layers", "requests", "tokens", "entries", "width", "rows of the budget", "MB"),
        ("tokens", "entries", "width", "rows of the budget", "MB"),
    )  # fmt: skip
    for one in report.chunks[:MAX_REQUESTS]:
        table.add_row(
            one.layer_type, _span(*one.requests), str(one.tokens), str(one.compressed), str(one.width),
            f"{one.rows:,} of {one.budget:,}", f"{one.bytes / 1e6:.1f}",
        )  # fmt: skip
    _left_out(table, len(report.chunks) - MAX_REQUESTS, "chunks")
    return table


def _layers(report: StepReport) -> Table:
    table = _table("Layer types", ("type", "layers", "a token sees", "plan"), ("layers",))
    for one in report.layers:
        table.add_row(one.layer_type, str(one.layers), one.sees, escape(one.plan))
    return table


def _left_out(table: Table, count: int, what: str) -> None:
    if count > 0:
        table.caption = f"{count} more {what}; --json has them all"
        table.caption_justify = "left"


def _span(first: int | None, last: int | None, between: str = " to ") -> str:
    if first is None or last is None or first < 0 > last:
        return "none"
    return str(first) if first == last else f"{first}{between}{last}"


def _number(value: int) -> str:
    return "" if value < 0 else str(value)
