"""The write kernel, byte for byte against recorded pages, hand values and a codec that shares no code with it."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl

from swa_backend.cache_layout import get_layout
from swa_backend.kernels.cache_write import MOST_FEW, superseded, write_kv
from swa_backend.kernels.jit import Tuning, kernel
from swa_backend.pages import PageView
from tests.cache_twin import WRITABLE_FORMS
from tests.independent_codec import WRITABLE, encode
from tests.kernels.pools import bf16, bits_of, make_twin, wild_keys
from tests.support import golden_cases

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter, at overflow and NaN
PAGE = {19_008: 32, 37_440: 64, 149_760: 256}


@pytest.mark.parametrize("path", golden_cases("kv", "insert_*.npz"), ids=lambda path: path.stem)
def test_golden_insert_is_byte_exact(device: torch.device, path: Path) -> None:
    with np.load(path) as file:
        bits, slots, recorded = file["k__bf16"], file["slot_mapping"], file["pages"]
    twin = make_twin(device, "fp8_ds_mla", entries=PAGE[recorded.shape[1]], pages=len(recorded))
    write_kv(bf16(bits, device), twin.view, torch.from_numpy(slots).to(device))
    np.testing.assert_array_equal(twin.memory.cpu().numpy().reshape(recorded.shape), recorded)


@pytest.mark.parametrize(("entries", "gap", "first"), [(32, 0, 0), (64, 6, 2), (2, 1024, 16)])
@pytest.mark.parametrize(("name", "dialect"), WRITABLE_FORMS)
def test_every_layout_and_dialect(
    device: torch.device, name: str, dialect: str, entries: int, gap: int, first: int
) -> None:
    twin = make_twin(device, name, dialect, entries, pages=5, gap=gap, first=first, scale=0.37)
    rng = np.random.default_rng(entries)
    bits = wild_keys(29, seed=gap)
    room = 5 * entries
    slots = rng.permutation(max(room, 64))[:27]  # past the capacity for small pages
    slots[3], slots[11], slots[20] = -1, room, -(2**40)
    slots[25] = 2**40 + 1
    write_kv(bf16(bits, device), twin.view, torch.from_numpy(slots).to(device))
    twin.pool.write(bits, slots.tolist())
    twin.assert_same_bytes()


@pytest.mark.simulate
def test_c4_one_page_of_known_rows(device: torch.device) -> None:
    twin = make_twin(device, "fp8_ds_mla", entries=64, pages=1)
    k = torch.zeros(2, 512, dtype=torch.bfloat16)
    k[0, 0], k[0, 64], k[0, 448] = 448.0, -0.75, 3.0  # scale 1; scale 2^-9 so that -0.75 becomes -384
    k[1, 447], k[1, 511] = 1.0, -2.0  # scale 2^-8
    write_kv(k.to(device), twin.view, torch.tensor([1, 63], device=device))
    page = twin.memory.cpu()
    tiny = 127 - 22  # of a group of zeros
    assert page[576 : 576 + 65].tolist() == [0x7E, *[0] * 63, 0xFC]
    assert page[576 + 448 : 576 + 450].tolist() == [0x40, 0x40]
    assert page[63 * 576 + 447] == 0x78
    assert page[63 * 576 + 574 : 63 * 576 + 576].tolist() == [0x00, 0xC0]
    assert page[64 * 576 + 8 : 64 * 576 + 16].tolist() == [127, 118, *[tiny] * 5, 0]
    assert page[64 * 576 + 63 * 8 :][:8].tolist() == [*[tiny] * 6, 119, 0]
    written = {*range(576, 1152), *range(63 * 576, 64 * 576), *range(64 * 576 + 8, 64 * 576 + 16)}
    written |= set(range(64 * 576 + 63 * 8, 64 * 584))
    assert all(page[i] == 0xAB for i in range(37_440) if i not in written)


def test_c1_a_cache_above_2_gib(device: torch.device) -> None:
    pages, page_bytes = 63_000, 37_440
    # On the CPU never filled: the operating system commits only the few pages that are touched.
    memory = torch.empty(pages * page_bytes, dtype=torch.uint8, device=device)
    rows = memory.as_strided((pages, 64, 584), (page_bytes, 584, 1))
    slots = [3_670_911, 3_670_912, 3_670_913, 3_670_976, 3_671_040, pages * 64 - 1]
    bits = wild_keys(len(slots), seed=1)
    write_kv(bf16(bits, device), PageView.of(rows, get_layout("fp8_ds_mla"), 64), torch.tensor(slots, device=device))
    data, scales = encode(bits, "fp8_ds_mla")
    for token, slot in enumerate(slots):
        page = slot // 64 * page_bytes
        at, scales_at = page + slot % 64 * 576, page + 64 * 576 + slot % 64 * 8
        np.testing.assert_array_equal(memory[at : at + 576].cpu().numpy(), data[token])
        np.testing.assert_array_equal(memory[scales_at : scales_at + 8].cpu().numpy(), scales[token])


def test_c3_stride_and_storage_offset(device: torch.device) -> None:
    twin = make_twin(device, "fp8_ds_mla", entries=64, gap=1_435_968 - 37_440, first=37_440 * 5 + 64)
    bits = wild_keys(3, seed=3)
    write_kv(bf16(bits, device), twin.view, torch.tensor([63, 64, 65], device=device))
    twin.pool.write(bits, [63, 64, 65])
    twin.assert_same_bytes()


@pytest.mark.parametrize("name", WRITABLE)
def test_g2_a_negative_slot_changes_no_byte(device: torch.device, name: str) -> None:
    twin = make_twin(device, name)
    bits = np.full((20, 512), 0x7FC0, np.uint16)
    write_kv(bf16(bits, device), twin.view, torch.full((20,), -1, device=device))
    twin.assert_same_bytes()


@pytest.mark.simulate
@pytest.mark.parametrize(("repeated", "first"), [(False, 0), (True, 0), (True, 2)])
def test_a_step_of_many_tokens(device: torch.device, repeated: bool, first: int) -> None:
    """Large steps take larger tiles; runs of slots cross them, and some slots come again at the far end."""
    tokens = MOST_FEW + 77
    twin = make_twin(device, "fp8_ds_mla", entries=64, pages=20, first=first)
    bits = np.tile(wild_keys(64, seed=8), (tokens // 64 + 1, 1))[:tokens]
    bits[:, 0] = np.arange(tokens)  # no two rows are equal
    slots = np.arange(20 * 64 - 1, 20 * 64 - 1 - tokens, -1) if repeated else np.arange(tokens) + 9
    slots[70:75] = -1
    if repeated:
        slots[-40:-20] = slots[10:30]
    write_kv(bf16(bits, device), twin.view, torch.from_numpy(slots).to(device))
    twin.pool.write(bits, slots.tolist())
    twin.assert_same_bytes()


@pytest.mark.parametrize(
    "slots",
    [
        [5, 6] * 20,  # within a tile and across tiles
        [*range(40), *range(10, 20)],  # every tile rises; a later one takes slots of two of them
        [7, 8, -1, 10, 7, *range(20, 40), 8],
        [-1] * 9 + [3] * 3,
    ],
)
@pytest.mark.parametrize("name", WRITABLE)
def test_of_equal_slots_the_last_wins_whole(device: torch.device, name: str, slots: list[int]) -> None:
    twin = make_twin(device, name)
    bits = wild_keys(len(slots), seed=5)
    write_kv(bf16(bits, device), twin.view, torch.tensor(slots, device=device))
    twin.pool.write(bits, slots)
    twin.assert_same_bytes()


@kernel(
    types={"slots": "*i64", "out": "*i32", "tokens": "i32"},
    tuning={"": Tuning(1, 1, tiles={"TOKENS": 8, "SCAN": 32})},
    keys=lambda config, dialects: (),
)
def mark_superseded(slots, out, tokens, TOKENS: tl.constexpr, SCAN: tl.constexpr):
    first = tl.program_id(0) * TOKENS
    token = first + tl.arange(0, TOKENS)
    slot = tl.load(slots + tl.minimum(token, tokens - 1), mask=token < tokens, other=-1).to(tl.int32)
    taken = (superseded(slots, slot, first, tokens, TOKENS, SCAN) >> tl.arange(0, TOKENS)) & 1
    tl.store(out + tl.minimum(token, tokens - 1), tl.where(slot < 0, 2, taken), mask=token < tokens)


@pytest.mark.parametrize("tokens", [1, 8, 13, 100])
@pytest.mark.parametrize("kind", ["rising", "pages", "random", "equal", "later run", "gaps"])
def test_a_token_knows_whether_a_later_one_has_its_slot(device: torch.device, tokens: int, kind: str) -> None:
    rng = np.random.default_rng(tokens)
    rising = np.arange(tokens)
    slots = {
        "rising": rising + 5,
        "pages": rng.permutation(40)[rising // 5] * 8 + rising % 5,
        "random": rng.integers(-1, tokens, tokens),
        "equal": np.full(tokens, 7),
        "later run": np.where(rising < tokens // 2, rising, rising - tokens // 2 - 3),
        "gaps": np.where(rising % 3 == 0, -1, rising % 50),
    }[kind]
    out = torch.full((tokens,), 77, dtype=torch.int32, device=device)
    where = torch.from_numpy(slots).to(device)
    mark_superseded.on(device).launch((-(-tokens // 8), 1, 1), where, out, tokens)
    expected = [2 if slot < 0 else int(slot in slots[t + 1 :]) for t, slot in enumerate(slots)]
    assert out.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITABLE)
def test_equal_slots_never_mix_when_programs_run_at_once(name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    slots = np.random.default_rng(0).integers(0, 64, 4096)
    bits = wild_keys(4096, seed=6)
    twin = make_twin(device, name, pages=2)
    keys, where = bf16(bits, device), torch.from_numpy(slots).to(device)
    twin.pool.write(bits, slots.tolist())
    for _ in range(20):
        write_kv(keys, twin.view, where)
        twin.assert_same_bytes()


def test_h2_keys_at_the_end_of_an_allocation_and_rows_apart(device: torch.device) -> None:
    wide = bf16(wild_keys(8, seed=8), device).view(4, 1024)
    keys = wide[:, 512:]  # the last row ends with the allocation
    twin = make_twin(device, "fp8_ds_mla")
    write_kv(keys, twin.view, torch.arange(3, device=device))  # a key more than slots
    twin.pool.write(bits_of(keys), [0, 1, 2])
    twin.assert_same_bytes()


def test_keys_that_are_not_aligned(device: torch.device) -> None:
    flat = bf16(wild_keys(5, seed=9), device).flatten()
    keys = flat[3 : 3 + 4 * 512].view(4, 512)
    twin = make_twin(device, "fp8_ds_mla_v41")
    write_kv(keys, twin.view, torch.tensor([9, 3, 4, 5], device=device))
    twin.pool.write(bits_of(keys), [9, 3, 4, 5])
    twin.assert_same_bytes()


def test_no_token(device: torch.device) -> None:
    twin = make_twin(device, "fp8_ds_mla")
    write_kv(bf16(wild_keys(3, seed=0), device), twin.view, torch.empty(0, dtype=torch.int64, device=device))
    twin.assert_same_bytes()
