"""Top-k mapping against hand-written cases and a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_backend.errors import BatchError, ValidationError
from swa_backend.problems import Problem, count_problems
from swa_backend.registry import get_backend
from swa_backend.topk import TopkSlots, map_topk

FAR = 1 << 21  # a position from which every entry used here is complete


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(
    topk: Any,
    requests: list[int],
    table: torch.Tensor,
    *,
    positions: list[int] | None = None,
    valid: list[bool] | None = None,
    entries_per_page: int = 16,
    ratio: int = 4,
    num_pages: int | None = None,
    **options: Any,
) -> TopkSlots:
    topk = topk if isinstance(topk, torch.Tensor) else ints(topk)
    return map_topk(
        topk,
        ints(requests),
        ints(positions if positions is not None else [FAR] * topk.shape[0]),
        table,
        entries_per_page,
        torch.tensor(valid if valid is not None else [True] * topk.shape[0], dtype=torch.bool),
        ratio,
        num_pages,
        backend=get_backend("cpu"),
        **options,
    )


def slow(
    topk: list[list[int]],
    requests: list[int],
    positions: list[int],
    table: list[list[int]],
    entries_per_page: int,
    valid: list[bool],
    ratio: int,
    num_pages: int | None,
) -> list[list[int]]:
    """The survivors of each row, one entry at a time."""
    result = []
    for t, row in enumerate(topk):
        kept: list[int] = []
        for entry in row:
            if not valid[t] or not 0 <= requests[t] < len(table) or entry < 0:
                continue
            if entry >= (positions[t] + 1) // ratio or entry // entries_per_page >= len(table[requests[t]]):
                continue
            page = table[requests[t]][entry // entries_per_page]
            if page >= 0 and (num_pages is None or page < num_pages):
                kept.append(page * entries_per_page + entry % entries_per_page)
        result.append(kept)
    return result


class TestCases:
    def test_g1_a_view_of_a_wider_table(self) -> None:
        wide = ints([[*range(10, 18), *[777] * 8], [*range(20, 28), *[888] * 8]])
        table = wide[:, :8]
        assert table.stride(0) == 16
        slots, lens = run(
            [[3, 9999, -1], [9999, 3, -1], [1, 2, 3], [4, 5, 6]], [0, 1, 5, -1], table, valid=[True, True, False, False]
        )
        assert slots.tolist() == [[163, -1, -1], [323, -1, -1], [-1] * 3, [-1] * 3]
        assert lens.tolist() == [1, 1, 0, 0]

    def test_g1_a_request_outside_the_table_keeps_nothing_even_if_valid(self) -> None:
        slots, lens = run([[3, 9999, -1]] * 4, [0, 1, 5, -1], ints([[1] * 8, [2] * 8]))
        assert lens.tolist() == [1, 1, 0, 0]
        assert slots[:, 0].tolist() == [19, 35, -1, -1]

    def test_g10_the_last_row_never_reads_past_its_columns(self) -> None:
        storage = ints([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])  # what follows the table holds legal page numbers
        entries = [0, 3, 127, 128, 130, 8192, 100000, 1048575, 2**31 - 1]
        slots, lens = run([entries], [1], storage[:2], entries_per_page=32, ratio=1, positions=[2**31 - 1 - 1])
        assert slots.tolist() == [[160, 163, 8 * 32 + 31] + [-1] * 6]
        assert lens.tolist() == [3]

    def test_s8_only_complete_entries(self) -> None:
        positions = [1023, 1024, 1025, 1026, 1027]  # sequence 1028, five queries
        table = ints([list(range(20))])
        slots, lens = run([[255, 256, 0]] * 5, [0] * 5, table, positions=positions)
        assert lens.tolist() == [2, 2, 2, 2, 3]
        assert slots.tolist() == [[255, 0, -1]] * 4 + [[255, 256, 0]]

    def test_survivors_keep_their_order_and_repeat(self) -> None:
        slots, lens = run([[-1, 7, -5, 2, 7, 9999, 0]], [0], ints([[3]]))
        assert slots.tolist() == [[55, 50, 55, 48, -1, -1, -1]]
        assert lens.tolist() == [4]

    @pytest.mark.parametrize(("page", "num_pages", "kept"), [(-1, None, 0), (-(2**31), 5, 0), (5, 5, 0), (4, 5, 1)])
    def test_pages_outside_the_cache_are_dropped(self, page: int, num_pages: int | None, kept: int) -> None:
        assert run([[3]], [0], ints([[page]]), num_pages=num_pages).lens.tolist() == [kept]

    def test_a_slot_that_does_not_fit_int32_is_dropped(self) -> None:
        slots, lens = run([[0, 20]], [0], ints([[2**31 - 1, 1]]))
        assert slots.tolist() == [[20, -1]]
        assert lens.tolist() == [1]

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
    def test_nothing_to_map(self, shape: tuple[int, int]) -> None:
        slots, lens = run(torch.empty(shape, dtype=torch.int32), [0] * shape[0], ints([[1]]))
        assert slots.shape == shape
        assert lens.tolist() == [0] * shape[0]

    @pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
    def test_an_empty_table_keeps_nothing(self, shape: tuple[int, int]) -> None:
        slots, lens = run([[0, 1]], [0], torch.empty(shape, dtype=torch.int32))
        assert (slots.tolist(), lens.tolist()) == ([[-1, -1]], [0])

    def test_out_is_written_in_full(self) -> None:
        slots, lens = torch.full((2, 4), 99, dtype=torch.int32), torch.full((2,), 99, dtype=torch.int32)
        result = run([[1, -1, -1, -1]] * 2, [0, 0], ints([[0]]), valid=[True, False], out=(slots, lens))
        assert result.slots is slots
        assert result.lens is lens
        assert slots.tolist() == [[1, -1, -1, -1], [-1] * 4]
        assert lens.tolist() == [1, 0]

    def test_int64_positions_and_strided_topk(self) -> None:
        topk = ints([[1, 9, 2, 9], [3, 9, 0, 9]])[:, :3]
        positions = torch.tensor([7, 15])
        slots, lens = map_topk(
            topk,
            ints([0, 0]),
            positions,
            ints([[0]]),
            16,
            torch.ones(2, dtype=torch.bool),
            4,
            backend=get_backend("cpu"),
        )
        assert slots.tolist() == [[1, -1, -1], [3, 0, -1]]
        assert lens.tolist() == [1, 2]

    def test_more_entries_than_one_chunk(self) -> None:
        topk = torch.randint(-100, 3000, (1500, 1024), dtype=torch.int32)
        table = torch.randperm(200)[:160].int().reshape(1, 160)
        positions = list(range(8000, 9500))
        slots, lens = run(topk, [0] * 1500, table, positions=positions, num_pages=190)
        for t in (0, 1023, 1024, 1499):
            [expected] = slow([topk[t].tolist()], [0], [positions[t]], table.tolist(), 16, [True], 4, 190)
            assert slots[t, : lens[t]].tolist() == expected
            assert slots[t, lens[t] :].eq(-1).all()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_a_plain_loop(data: st.DataObject) -> None:
    draw = data.draw
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    entries_per_page, ratio = draw(st.sampled_from([1, 2, 16, 64])), draw(st.sampled_from([1, 2, 4, 128]))
    num_pages = draw(st.one_of(st.none(), st.integers(0, 30)))
    page = st.one_of(st.integers(0, 30), st.sampled_from([-1, -(2**31)]))
    table = [draw(st.lists(page, min_size=columns, max_size=columns)) for _ in range(rows)]
    tokens, width = draw(st.integers(0, 5)), draw(st.integers(0, 9))
    entry = st.one_of(st.integers(-2, columns * entries_per_page + 3), st.sampled_from([2**31 - 1, -(2**31)]))
    topk = [draw(st.lists(entry, min_size=width, max_size=width)) for _ in range(tokens)]
    requests = [draw(st.integers(-1, rows)) for _ in range(tokens)]
    positions = [draw(st.one_of(st.integers(0, 400), st.just(-1), st.just(2**31 - 2))) for _ in range(tokens)]
    valid = [draw(st.booleans()) for _ in range(tokens)]

    slots, lens = run(
        ints(topk).reshape(tokens, width),
        requests,
        ints(table).reshape(rows, columns),
        positions=positions,
        valid=valid,
        entries_per_page=entries_per_page,
        ratio=ratio,
        num_pages=num_pages,
    )
    expected = slow(topk, requests, positions, table, entries_per_page, valid, ratio, num_pages)
    assert lens.tolist() == [len(row) for row in expected]
    assert slots.tolist() == [row + [-1] * (width - len(row)) for row in expected]


class TestChecks:
    ARGUMENTS: dict[str, Any] = {  # noqa: RUF012
        "topk": ints([[1, 2]]),
        "token_to_req": ints([0]),
        "positions": ints([9]),
        "block_table": ints([[1, 2]]),
        "entries_per_page": 16,
        "is_valid": torch.tensor([True]),
        "ratio": 4,
    }

    @pytest.mark.parametrize(
        ("field", "bad"),
        [
            ("topk", torch.tensor([[1, 2]])),
            ("topk", ints([1, 2])),
            ("topk", [[1, 2]]),
            ("topk", ints([[1, 2], [3, 4]]).T[:1]),
            ("token_to_req", torch.tensor([0])),
            ("token_to_req", ints([0, 0])),
            ("positions", torch.tensor([9.0])),
            ("positions", ints([9, 9])),
            ("block_table", ints([1, 2])),
            ("block_table", torch.tensor([[1, 2]])),
            ("entries_per_page", 0),
            ("entries_per_page", 16.0),
            ("is_valid", ints([1])),
            ("ratio", 0),
            ("ratio", True),
            ("num_pages", -1),
        ],
    )
    def test_bad_argument_is_named(self, field: str, bad: object) -> None:
        with pytest.raises(BatchError) as error:
            map_topk(**{**self.ARGUMENTS, field: bad}, backend=get_backend("cpu"))
        assert error.value.field == field

    def test_bad_out(self) -> None:
        for out, field in (
            ((torch.empty(1, 3, dtype=torch.int32), ints([0])), "out[0]"),
            ((torch.empty(1, 2, dtype=torch.int64), ints([0])), "out[0]"),
            ((torch.empty(1, 2, dtype=torch.int32), torch.tensor([0])), "out[1]"),
            ((self.ARGUMENTS["topk"], ints([0])), "out[0]"),
            ((torch.empty(1, 2, dtype=torch.int32), self.ARGUMENTS["topk"][0, :1]), "out[1]"),
        ):
            with pytest.raises(BatchError) as error:
                map_topk(**self.ARGUMENTS, out=out, backend=get_backend("cpu"))
            assert error.value.field == field

    def test_out_rows_that_share_memory(self) -> None:
        wide, lens = ints([[0]] * 6), ints([0] * 4)
        for topk, slots in (
            (wide[:4], wide[2:]),  # overlaps topk
            (wide[:4], ints([[0]]).expand(4, 1)),
            (ints([[0, 1]] * 4), torch.zeros(5, dtype=torch.int32).as_strided((4, 2), (1, 1))),
        ):
            with pytest.raises(BatchError) as error:
                run(topk, [0] * 4, ints([[1]]), out=(slots, lens))
            assert error.value.field == "out[0]"
        assert run(wide[:2], [0] * 2, ints([[1]]), out=(wide[2:4], wide[4:, 0])).lens.tolist() == [1, 1]

    def test_backend_is_a_descriptor(self) -> None:
        with pytest.raises(BatchError) as error:
            map_topk(**self.ARGUMENTS, backend="cpu")  # type: ignore[arg-type]
        assert error.value.field == "backend"

    def test_distinct_is_a_bool(self) -> None:
        with pytest.raises(BatchError) as error:
            map_topk(**self.ARGUMENTS, backend=get_backend("cpu"), distinct=1)  # type: ignore[arg-type]
        assert error.value.field == "distinct"


def test_the_promise_of_distinct_picks_is_checked_in_validation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 may occur as often as it likes."""
    table, apart, twice = ints([[1]]), ints([[3, -1, 0, -1]] * 3), ints([[3, -1, 0, -1], [2, 0, 1, 2], [1, 1, 1, -1]])
    requests = [0] * 3
    run(twice, requests, table, distinct=True)  # not looked at
    monkeypatch.setenv("SWA_BACKEND_VALIDATE", "1")
    run(apart, requests, table, distinct=True)
    run(twice, requests, table, distinct=False)
    with pytest.raises(ValidationError) as error:
        run(twice, requests, table, distinct=True)
    assert error.value.field == "topk[1]"
    assert "entry 2 twice" in str(error.value)
    with count_problems() as problems:
        run(twice, requests, table, distinct=True)
    assert problems.counts == {Problem.ROWS: 2}
