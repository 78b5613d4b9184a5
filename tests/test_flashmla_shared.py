"""What FlashMLA's layers share in a step serves no call that differs in anything that it depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swa_backend.layer_types import LayerType
from swa_platform_cuda.flashmla_shared import Shared
from swa_platform_cuda.flashmla_workspace import Workspace

LENS = torch.ones(2, dtype=torch.int32)
ROWS = torch.zeros(2, 1, 128, dtype=torch.int32)
VALID = torch.ones(2, dtype=torch.bool)


def call(second: Any = None, **changed: Any) -> Any:
    given = {"generation": 3, "heads": 64, "entries": 64, "num_pages": 9, "capture": 0, "valid": VALID, **changed}
    return SimpleNamespace(
        metadata=SimpleNamespace(generation=given["generation"], is_valid_token=given["valid"], shape=None),
        q=torch.zeros(2, given["heads"], 512), capture=given["capture"], compressed=second,
        pages=SimpleNamespace(entries=given["entries"], num_pages=given["num_pages"]),
    )  # fmt: skip


def second(**changed: Any) -> Any:
    given = {
        "entries": 64, "num_pages": 5, "rows": torch.zeros(2, 64, dtype=torch.int32), "lens": LENS, "mark": None,
        "built": None, **changed,
    }  # fmt: skip
    pages = SimpleNamespace(entries=given.pop("entries"), num_pages=given.pop("num_pages"))
    return SimpleNamespace(pages=pages, **given)


def mark(**changed: Any) -> Any:
    return SimpleNamespace(**{"distinct": True, "positions": VALID, "positions_version": 1, "number": 7, **changed})


def shared(workspace: Workspace, made_for: Any = None, layer_type: LayerType = LayerType.SWAONLY) -> Shared:
    given, made = (ROWS, LENS, VALID), (ROWS, LENS, None, None)
    return Shared(made_for or call(), layer_type, given, made, "plan", workspace)


@pytest.mark.parametrize(
    "changed",
    [{"generation": 4}, {"heads": 32}, {"entries": 32}, {"num_pages": 8}, {"capture": 5}, {"valid": VALID.clone()}],
)
def test_another_step_shape_cache_capture_or_tensor(changed: dict[str, Any]) -> None:
    workspace = Workspace(torch.device("cpu"))
    one = shared(workspace)
    assert one.serves(call(), LayerType.SWAONLY, ROWS, LENS, workspace)
    assert not one.serves(call(**changed), LayerType.SWAONLY, ROWS, LENS, workspace)


def test_other_rows_lengths_layers_or_contents_of_the_workspace() -> None:
    workspace = Workspace(torch.device("cpu"))
    one = shared(workspace)
    assert not one.serves(call(), LayerType.SWAONLY, ROWS.clone(), LENS, workspace)
    assert not one.serves(call(), LayerType.SWAONLY, ROWS, LENS.clone(), workspace)
    assert not one.serves(call(), LayerType.C4A, ROWS, LENS, workspace)
    assert one.serves(call(), LayerType.SWAONLY, ROWS, LENS, workspace)
    assert not workspace.holds("rows", "those of another step")
    assert not one.serves(call(), LayerType.SWAONLY, ROWS, LENS, workspace)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_change_by_torch(which: int) -> None:
    workspace = Workspace(torch.device("cpu"))
    rows, lens, valid = ROWS.clone(), LENS.clone(), VALID.clone()
    one = Shared(call(valid=valid), LayerType.SWAONLY, (rows, lens, valid), (rows, lens, None, None), None, workspace)
    assert one.serves(call(valid=valid), LayerType.SWAONLY, rows, lens, workspace)
    (rows, lens, valid)[which].zero_()
    assert not one.serves(call(valid=valid), LayerType.SWAONLY, rows, lens, workspace)


BUILT = SimpleNamespace()
ROWS_OF_TWO = torch.zeros(2, 64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("made_for", "another", "serves"),
    [
        (second(mark=mark()), second(mark=mark(number=8)), True),  # distinct picks of another layer
        (second(mark=mark()), second(mark=mark(positions=LENS)), False),
        (second(mark=mark()), second(mark=mark(positions_version=2)), False),
        (second(mark=mark()), second(mark=mark(distinct=False)), False),
        (second(mark=mark()), second(mark=mark(), num_pages=6), False),
        (second(mark=mark()), second(mark=mark(), entries=32), False),
        (second(mark=mark()), second(mark=mark(), rows=ROWS[:, 0]), False),
        (second(mark=mark(distinct=False)), second(mark=mark(distinct=False)), True),  # the same mapping once more
        (second(mark=mark(distinct=False)), second(mark=mark(distinct=False, number=8)), False),
        (second(built=BUILT, rows=ROWS_OF_TWO), second(built=BUILT, rows=ROWS_OF_TWO), True),
        (second(built=BUILT, rows=ROWS_OF_TWO), second(built=SimpleNamespace(), rows=ROWS_OF_TWO), False),
        (second(), second(), False),  # of unknown origin: nothing tells whether they are the same
    ],
)
def test_second_entries(made_for: Any, another: Any, serves: bool) -> None:
    workspace = Workspace(torch.device("cpu"))
    one = shared(workspace, call(made_for), LayerType.C4A)
    assert one.serves(call(another), LayerType.C4A, ROWS, LENS, workspace) == serves
