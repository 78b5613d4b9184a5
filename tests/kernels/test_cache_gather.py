"""The gather kernel against recorded workspaces, hand values and a codec that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swa_backend.cache_layout import get_layout
from swa_backend.kernels import cache_gather
from swa_backend.kernels.cache_gather import gather_kv
from swa_backend.pages import PageView
from tests.cache_twin import READABLE_FORMS
from tests.independent_codec import FORMS, Array, bf16_bits, bf16_values, decode, encode
from tests.kernels.pools import Twin, bf16, bits_of, make_twin, wild_keys
from tests.support import GOLDEN

POISON = 0x1234
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, at overflow and NaN


def ints(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(
    twin: Twin, table: Array, seq_lens: list[int], lens: list[int] | None, height: int, offset: int, apart: int = 0
) -> None:
    """Gather into a poisoned workspace whose requests are ``apart`` rows further apart than they are high."""
    device, requests = twin.memory.device, len(seq_lens)
    whole = bf16(np.full((requests, height + apart, 512), POISON, np.uint16), device)
    # What follows a row of the table are legal pages.
    wide = torch.from_numpy(np.pad(table, ((0, 0), (0, 2)), constant_values=1)).to(device)
    gather_kv(
        twin.view, wide[:, : table.shape[1]], ints(seq_lens, device), None if lens is None else ints(lens, device),
        whole[:, :height], offset,
    )  # fmt: skip
    expected = np.full((requests, height + apart, 512), POISON, np.uint16)
    twin.pool.gather(table, seq_lens, seq_lens if lens is None else lens, expected[:, :height], offset)
    found, lost = bits_of(whole), np.isnan(bf16_values(expected))
    np.testing.assert_array_equal(np.isnan(bf16_values(found)), lost)
    np.testing.assert_array_equal(np.where(lost, 0, found), np.where(lost, 0, expected))


def test_golden_gather(device: torch.device) -> None:
    with np.load(GOLDEN / "kv" / "gather_bs64.npz") as file:
        case = {key: file[key] for key in file.files}
    twin = make_twin(device, "fp8_ds_mla", entries=64, pages=len(case["pages"]))
    twin.memory.copy_(torch.from_numpy(case["pages"].ravel()))
    names = ("block_table", "seq_lens", "gather_lens")
    table, seq_lens, gather_lens = (torch.from_numpy(case[key]).to(device) for key in names)
    for name, lens, offset in (("full", None, 0), ("tail", gather_lens, 8)):
        out = torch.zeros(case[f"{name}__bf16"].shape, dtype=torch.bfloat16, device=device)
        gather_kv(twin.view, table, seq_lens, lens, out, offset)
        np.testing.assert_array_equal(bits_of(out), case[f"{name}__bf16"])


@pytest.mark.parametrize(("entries", "gap", "first"), [(32, 0, 0), (2, 6, 2), (16, 1024, 16)])
@pytest.mark.parametrize(("name", "dialect"), READABLE_FORMS)
def test_any_bytes_of_every_layout(
    device: torch.device, name: str, dialect: str, entries: int, gap: int, first: int
) -> None:
    twin = make_twin(device, name, dialect, entries, pages=9, gap=gap, first=first, scale=0.37)
    twin.randomise(entries)
    table = np.array([[3, -1, 8, 0], [9, 7, -(2**31), 2], [2**31 - 1, 1, 5, 6]], np.int32)
    reach = 4 * entries
    # A request may be longer than its table, and its gather longer than the workspace.
    check(twin, table, [reach, reach - 1, min(reach, 20)], None, min(reach, 24) + 3, 3, apart=1)
    check(twin, table, [reach + 3, 5, 0], [9, 5, 0], 7, 0)


@pytest.mark.simulate
def test_a_row_by_hand(device: torch.device) -> None:
    twin = make_twin(device, "fp8_ds_mla", entries=2, pages=2)
    memory = torch.zeros(1728 * 2, dtype=torch.uint8)
    row = 1728 + 576  # token 1 of page 1
    memory[row], memory[row + 1], memory[row + 64] = 0x38, 0xB8, 0x7E  # 1, -1, 448
    memory[row + 448], memory[row + 449] = 0x40, 0x40  # bf16 3.0
    memory[1728 + 2 * 576 + 8 :][:8] = torch.tensor([128, 0, 255, 127, 127, 127, 127, 0])
    twin.memory.copy_(memory)
    out = torch.full((1, 3, 512), 7.0, dtype=torch.bfloat16, device=device)
    gather_kv(twin.view, ints([[0, 1]], device), ints([4], device), ints([1], device), out, 1)
    found = out.float().cpu()[0]
    assert (found[0] == 7.0).all()
    assert (found[2] == 7.0).all()
    assert found[1, :3].tolist() == [2.0, -2.0, 0.0]
    assert found[1, 64] == 448.0 * 2.0**-127  # a subnormal scale
    assert found[1, 128:192].isnan().all()
    assert found[1, 448] == 3.0
    assert not found[1, 449:].any()


def test_c1_a_cache_above_2_gib(device: torch.device) -> None:
    pages, page_bytes = 63_000, 37_440
    memory = torch.empty(pages * page_bytes, dtype=torch.uint8, device=device)
    view = PageView.of(memory.as_strided((pages, 64, 584), (page_bytes, 584, 1)), get_layout("fp8_ds_mla"), 64)
    slots = [3_670_911, 3_670_912, 3_670_913, 3_670_976, 3_671_040, pages * 64 - 1]
    bits = np.random.default_rng(1).integers(0, 0x4400, (len(slots), 512)).astype(np.uint16)
    data, scales = encode(bits, "fp8_ds_mla")
    for token, slot in enumerate(slots):
        page, entry = slot // 64 * page_bytes, slot % 64
        memory[page + entry * 576 :][:576] = torch.from_numpy(data[token]).to(device)
        memory[page + 64 * 576 + entry * 8 :][:8] = torch.from_numpy(scales[token]).to(device)
    expected = bf16_bits(decode(data, scales, "fp8_ds_mla"))
    for token, slot in enumerate(slots):
        out = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device)
        table, length = ints([[slot // 64]], device), ints([slot % 64 + 1], device)
        gather_kv(view, table, length, ints([1], device), out, 0)
        np.testing.assert_array_equal(bits_of(out)[0, 0], expected[token])


@pytest.mark.parametrize("name", list(FORMS))
def test_c8_an_entry_without_a_page_is_a_zero_row(device: torch.device, name: str) -> None:
    twin = make_twin(device, name, entries=2, pages=2)
    twin.memory.fill_(0xFF)  # NaN wherever the layout has one
    out = torch.full((1, 8, 512), 7.0, dtype=torch.bfloat16, device=device)
    gather_kv(twin.view, ints([[-1, 2, 9]], device), ints([8], device), None, out, 0)
    assert not out.float().cpu().any()


def test_more_rows_than_one_share(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_gather, "MOST_PROGRAMS", 4)
    twin = make_twin(device, "fp8_ds_mla_v41", entries=32, pages=4)
    bits = wild_keys(128, seed=2)
    twin.pool.write(bits, list(range(128)))
    twin.memory.copy_(torch.from_numpy(twin.pool.memory))
    check(twin, np.array([[3, 1, 2, 0], [0, 0, 1, 1]], np.int32), [128, 70], None, 130, 1)


@pytest.mark.parametrize(("requests", "columns", "height"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_nothing_to_gather(device: torch.device, requests: int, columns: int, height: int) -> None:
    twin = make_twin(device, "bf16")
    check(twin, np.zeros((requests, columns), np.int32), [3] * requests, None, height, 0)
