"""A picture of a step: one line a token, the keys that it sees to the right of it, compressed entries beside them.

A step of more tokens or keys than a picture has room for is drawn in cells of several; the more of a cell is seen, the
stronger its colour. A key whose page is missing is never blended away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from swa_backend._math import cdiv
from swa_backend.errors import ConfigError
from swa_backend.figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, new_figure, save
from swa_backend.inspect.report import StepReport, TokenView
from swa_backend.inspect.seen import Key, window_keys
from swa_backend.layer_types import LayerType

FEW = 40  # up to so many tokens are drawn apart
MAX_BORDERS = 80  # more lines between requests would hide what they part
INCHES_OF_A_LABEL = 0.15
MAX_LINES, MAX_COLUMNS = 1000, 1400
COLOURS = {
    Key.WINDOW: BLUE,
    Key.IMAGE: ORANGE,
    Key.DRAFT: GREEN,
    Key.ENTRY: PURPLE,
    Key.CANDIDATE: "#ECC8DB",
    Key.MISSING: BLACK,
}
LABELS = {
    Key.WINDOW: "window",
    Key.IMAGE: "image, seen beyond the window",
    Key.DRAFT: "draft block",
    Key.ENTRY: "compressed entry",
    Key.CANDIDATE: "compressed entry that the indexer may pick",
    Key.MISSING: "no page: not seen",
}


@dataclass
class _Cells:
    """How many of each kind of key fall into each cell of a raster."""

    lines: int
    columns: int
    per_line: int
    per_column: int
    counts: np.ndarray

    @classmethod
    def of(cls, tokens: int, width: int) -> _Cells:
        per_line, per_column = max(cdiv(tokens, MAX_LINES), 1), max(cdiv(width, MAX_COLUMNS), 1)
        lines, columns = max(cdiv(tokens, per_line), 1), max(cdiv(width, per_column), 1)
        return cls(lines, columns, per_line, per_column, np.zeros((lines, columns, len(Key)), dtype=np.float32))

    def add(self, line: int, places: np.ndarray, keys: np.ndarray) -> None:
        """Count the keys at ``places`` of the token on a line."""
        np.add.at(self.counts[line // self.per_line], (places // self.per_column, keys), 1)

    def colours(self, background: np.ndarray) -> np.ndarray:
        """[lines, columns, 3], over a background [lines, 3]."""
        from matplotlib.colors import to_rgb

        palette = np.array([to_rgb(COLOURS.get(key, "white")) for key in Key])
        seen = self.counts.copy()
        seen[..., Key.NOTHING] = 0
        total = seen.sum(axis=2, keepdims=True)
        mixed = (seen @ palette) / np.maximum(total, 1)
        share = np.minimum(total / (self.per_line * self.per_column), 1)
        strength = np.where(total > 0, 0.25 + 0.75 * share, 0)
        picture = background[:, None] * (1 - strength) + mixed * strength
        missing = seen[..., Key.MISSING] > 0
        picture[missing] = palette[Key.MISSING]
        return np.asarray(picture)


def draw_step(report: StepReport, path: Path, kind: LayerType) -> None:
    """Draw what the tokens of a layer of type ``kind`` see.

    Args:
        report: the inspected step.
        path: file to write.
        kind: a layer type of the model.

    Raises:
        ConfigError: the step has no token.
    """
    split = report.facts["split"]
    ends = (0, split["decode_tokens"], len(report.tokens))
    parts = [(first, end) for first, end in pairwise(ends) if first < end]
    if not parts:
        raise ConfigError("plot", found="a step without tokens", legal="at least one token", fix="Draw another step.")
    compressed = kind in report.entries
    heights = [min(max(0.26 * (end - first), 0.9), 6.0 if len(parts) == 1 else 4.6) for first, end in parts]
    figure = new_figure(13 if compressed else 10, sum(heights) + 0.9 * len(parts) + 0.8)
    grid = figure.subplots(
        len(parts), 1 + compressed, squeeze=False, height_ratios=heights, width_ratios=(3, 2) if compressed else None
    )
    kinds: set[Key] = set()
    for (first, end), axes, height in zip(parts, grid, heights, strict=True):
        tokens = report.tokens[first:end]
        each = len(tokens) <= height / INCHES_OF_A_LABEL
        kinds |= _windows(axes[0], report, tokens, each)
        if compressed:
            kinds |= _entries(axes[1], report, tokens, kind)
        _label(axes[0], report, tokens, height, each)
    _legend(figure, report, kinds)
    figure.suptitle(
        f"{Path(report.facts['source']).name}: {report.facts['model']}, {kind} layers",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    save(figure, path)


def _windows(axes: Any, report: StepReport, tokens: Sequence[TokenView], each: bool) -> set[Key]:
    """Keys in the window cache; the kinds that occur."""
    seen = report.seen
    first_keys = {one.request: one.first_key for one in report.requests if one.first_key >= 0}
    bases = [first_keys.get(token.request, max(token.position, 0)) for token in tokens]
    drawn = {base for base, token in zip(bases, tokens, strict=True) if token.len} or {0}
    shared = len(drawn) == 1
    offset = min(drawn) if shared else 0  # what the axis counts from
    bases = [offset] * len(bases) if shared else bases
    lasts = [(token.last_key, base) for token, base in zip(tokens, bases, strict=True)]
    width = max((last - base + 1 for last, base in lasts if last is not None), default=1)
    cells = _Cells.of(len(tokens), width)
    kinds: set[Key] = set()
    for line, (token, base) in enumerate(zip(tokens, bases, strict=True)):
        keys = window_keys(report.step, seen, token.token)
        kinds.update(map(Key, np.unique(keys)))
        cells.add(line, np.arange(seen.first[token.token], seen.end[token.token]) - base, keys)
    _show(axes, cells, tokens, offset, each)
    axes.set_xlabel("position of the key" if shared else "position of the key, counted from the request's first one")
    part = "decodes" if tokens[0].token < report.facts["split"]["decode_tokens"] else "prefills"
    axes.set_title(f"{part}: keys in the window cache", loc="left", fontsize=10)
    if each:
        own = [(token.position - base + offset, line)
               for line, (token, base) in enumerate(zip(tokens, bases, strict=True)) if token.len]  # fmt: skip
        axes.plot([x for x, _ in own], [y for _, y in own], "o", color="white", markeredgecolor="black", markersize=4,
                  clip_on=False)  # fmt: skip
    return kinds


def _entries(axes: Any, report: StepReport, tokens: Sequence[TokenView], kind: LayerType) -> set[Key]:
    """Entries in the compressed cache; the kinds that occur."""
    own = report.entries[kind]
    cells = _Cells.of(len(tokens), max((int(own.complete[token.token]) for token in tokens), default=1))
    kinds: set[Key] = set()
    for line, token in enumerate(tokens):
        entries = own.entries[token.token]
        keys = np.full(len(entries), Key.ENTRY if own.known[token.token] else Key.CANDIDATE)
        keys[np.isin(entries, own.missing[token.token])] = Key.MISSING
        kinds.update(map(Key, np.unique(keys)))
        cells.add(line, entries, keys)
    _show(axes, cells, tokens, 0, len(tokens) <= FEW)
    axes.set_xlabel(f"number of the entry ({kind.ratio} tokens each)" if kind.ratio > 1 else "number of the entry")
    axes.set_title(f"entries in the {kind} cache", loc="left", fontsize=10)
    axes.set_yticks([])
    return kinds


def _show(axes: Any, cells: _Cells, tokens: Sequence[TokenView], offset: int, each: bool) -> None:
    """The raster; its cells cover whole tokens and positions, so edges lie half a unit before them."""
    background = np.ones((cells.lines, 3))
    for number, token in enumerate(tokens):
        background[number // cells.per_line] = 0.86 if token.part == "padding" else 0.96 if token.request % 2 else 1.0
    right = offset + cells.columns * cells.per_column
    axes.imshow(
        cells.colours(background), aspect="auto", interpolation="nearest",
        extent=(offset - 0.5, right - 0.5, cells.lines * cells.per_line - 0.5, -0.5),
    )  # fmt: skip
    borders = _borders(tokens)
    if each:
        for number in set(range(1, len(tokens))) - set(borders):
            axes.axhline(number - 0.5, color="white", linewidth=2)
    for number in borders if len(borders) <= MAX_BORDERS else ():
        axes.axhline(number - 0.5, color="black", linewidth=0.6)
    axes.set_xlim(offset - 0.5, right - 0.5)
    axes.set_ylim(len(tokens) - 0.5, -0.5)
    if cells.columns <= 12:
        axes.set_xticks(range(offset, right))


def _label(axes: Any, report: StepReport, tokens: Sequence[TokenView], height: float, each: bool) -> None:
    if each:
        axes.set_yticks(range(len(tokens)), list(map(_of_token, tokens)), fontsize=8)
        return
    line = INCHES_OF_A_LABEL * len(tokens) / height  # tokens beside which one line of text fits
    bands = list(_bands(tokens, line))
    axes.set_yticks(
        [(first + end - 1) / 2 for first, end in bands],
        [_of_band(report, tokens[first:end], ", " if end - first < 3 * line else "\n") for first, end in bands],
        fontsize=8,
    )
    axes.tick_params(left=False)


def _of_token(token: TokenView) -> str:
    if token.part == "padding":
        return f"token {token.token}: padding"
    keys = "no key" if token.first_key is None else f"keys {token.first_key} to {token.last_key}"
    return f"token {token.token}, request {token.request}, position {token.position}: {keys}"


def _bands(tokens: Sequence[TokenView], thin: float) -> Iterator[tuple[int, int]]:
    """Tokens ``first .. end - 1`` that share a label: one request's, or several's that are fewer than ``thin``."""
    first = before = 0
    for end in (*_borders(tokens), len(tokens)):
        if before > first and end - before >= thin:
            yield first, before
            first = before
        if end - first >= thin or end == len(tokens):
            yield first, end
            first = end
        before = end


def _borders(tokens: Sequence[TokenView]) -> list[int]:
    """Where another request begins."""
    return [i for i, (before, token) in enumerate(pairwise(tokens), 1) if token.request != before.request]


def _of_band(report: StepReport, tokens: Sequence[TokenView], between: str) -> str:
    requests = sorted({token.request for token in tokens if token.request >= 0})
    if not requests:
        return f"{len(tokens)} padded tokens"
    if len(requests) > 1:
        return f"requests {requests[0]}-{requests[-1]}, {len(tokens)} tokens"
    one = report.requests[requests[0]]
    lines = [f"request {one.request}", f"positions {one.first_position} to {one.last_position}"]
    lines += [f"keys {one.first_key} to {one.last_key}"] if one.first_key >= 0 else []
    return between.join(lines)


def _legend(figure: Any, report: StepReport, kinds: set[Key]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=COLOURS[key], label=LABELS[key]) for key in Key if key in kinds and key]
    if any(axes.lines and axes.lines[-1].get_marker() == "o" for axes in figure.axes):
        handles.append(
            Line2D([], [], marker="o", color="white", markeredgecolor="black", markersize=5, linestyle="none",
                   label="the token's own position")
        )  # fmt: skip
    if any(token.part == "padding" for token in report.tokens):
        handles.append(Patch(facecolor="#DBDBDB", label="padding"))
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=8.5, frameon=False)
