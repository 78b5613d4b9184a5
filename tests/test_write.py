"""`write_kv` and `gather_kv`: what they refuse always, what in validation mode, and that a refusal writes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.errors import BatchError, CacheError, ValidationError
from swa_backend.registry import get_backend
from swa_backend.write import gather_kv, write_kv

SLOTS = 3 * 64
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def cache() -> DeepseekV4SWACache:
    """Three pages of 64 tokens, zeroed."""
    cache = DeepseekV4SWACache(512, 128, torch.uint8, "layers.0", None, get_backend("cpu"))
    cache.bind_kv_cache(cache.allocate(3, "cpu"))
    return cache


def keys(count: int) -> torch.Tensor:
    return torch.ones(count, 512, dtype=torch.bfloat16)


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Writing


@pytest.mark.parametrize(
    ("field", "k", "mapping"),
    [
        ("k", keys(2).float(), slots(0, 1)),
        ("k", keys(2).half(), slots(0, 1)),
        ("k", torch.ones(2, 448, dtype=torch.bfloat16), slots(0, 1)),
        ("k", torch.ones(2, 1, 512, dtype=torch.bfloat16), slots(0, 1)),
        ("k", torch.ones(512, 2, dtype=torch.bfloat16).T, slots(0, 1)),
        ("k", keys(2).to("meta"), slots(0, 1)),
        ("k", None, slots(0, 1)),
        ("k", keys(1), slots(0, 1)),
        ("slot_mapping", keys(2), ints(0, 1)),
        ("slot_mapping", keys(2), slots(0, 1)[None]),
        ("slot_mapping", keys(4), slots(0, 1, 2, 3)[::2]),
        ("slot_mapping", keys(2), slots(0, 1).to("meta")),
        ("slot_mapping", keys(2), [0, 1]),
    ],
)
def test_write_refuses_other_forms(cache: DeepseekV4SWACache, field: str, k: Any, mapping: Any) -> None:
    with pytest.raises(BatchError) as error:
        write_kv(k, cache, mapping)
    assert error.value.field == field
    assert not cache.pages.data.any()


def test_fewer_keys_than_slots_names_both_counts(cache: DeepseekV4SWACache) -> None:
    with pytest.raises(BatchError, match="found 1 rows; legal: at least the 3 tokens"):
        write_kv(keys(1), cache, slots(0, 1, 2))


def test_no_token_is_no_work(cache: DeepseekV4SWACache) -> None:
    write_kv(keys(0), cache, slots(), validate=True)
    write_kv(keys(5), cache, slots(), validate=True)
    write_kv(keys(2), cache, slots(-1, -1), validate=True)
    assert not cache.pages.data.any()


def test_an_unbound_cache_and_what_is_none() -> None:
    unbound = DeepseekV4SWACache(512, 128, torch.uint8, "layers.7", None, get_backend("cpu"))
    with pytest.raises(CacheError, match=r"'layers\.7'"):
        write_kv(keys(1), unbound, slots(0))
    with pytest.raises(CacheError, match=r"'layers\.7'"):
        gather_kv(unbound, ints(0)[None], ints(1), None, keys(1)[None])
    for thing in (None, torch.zeros(3, 64, 584, dtype=torch.uint8)):
        with pytest.raises(CacheError, match=type(thing).__name__):
            write_kv(keys(1), thing, slots(0))  # type: ignore[arg-type]
        with pytest.raises(CacheError, match=type(thing).__name__):
            gather_kv(thing, ints(0)[None], ints(1), None, keys(1)[None])  # type: ignore[arg-type]


def test_288_byte_caches_are_read_only() -> None:
    cache = CompressedCache(4, "fp4_ds_mla_v41", 256, "layers.0.c4a", None, get_backend("cpu"))
    cache.bind_kv_cache(cache.allocate(1, "cpu"))
    with pytest.raises(CacheError, match="found fp4_ds_mla_v41; legal: a layout that can be written"):
        write_kv(keys(1), cache, slots(0))


@pytest.mark.parametrize("slot", [SLOTS, SLOTS + 7, 2**31, 2**62])
def test_a_slot_past_the_cache(cache: DeepseekV4SWACache, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kv(keys(3), cache, slots(-1, slot, -9))
    assert not cache.pages.data.any()
    with pytest.raises(ValidationError, match=rf"slot_mapping\[1\]: found {slot}; legal: -1, or 0 to 191"):
        write_kv(keys(3), cache, slots(0, slot, 1), validate=True)
    monkeypatch.setenv("SWA_BACKEND_VALIDATE", "1")
    with pytest.raises(ValidationError):
        write_kv(keys(3), cache, slots(0, slot, 1))
    assert not cache.pages.data.any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dim", [0, 447, 511])
def test_a_key_that_is_not_finite(cache: DeepseekV4SWACache, bad: float, dim: int) -> None:
    k = keys(4)
    k[2, dim] = bad
    with pytest.raises(ValidationError, match=rf"k\[2, {dim}\]: found {bad}"):
        write_kv(k, cache, slots(0, 1, 2), validate=True)
    assert not cache.pages.data.any()
    write_kv(k, cache, slots(0, 1, -1), validate=True)  # it is not stored ..
    write_kv(k, cache, slots(0, 1), validate=True)  # .. or past the mapping
    write_kv(k, cache, slots(0, 1, 2))  # without validation its group is lost, see the codec's tests


def test_validation_passes_a_right_write(cache: DeepseekV4SWACache) -> None:
    write_kv(keys(3), cache, slots(0, -1, SLOTS - 1), validate=True)
    assert cache.pages.data[0, 0] != 0
    assert cache.pages.data[2, 63 * 576] != 0


# Gathering


def call(cache: DeepseekV4SWACache, validate: bool = False, **changes: Any) -> torch.Tensor:
    """A legal gather of two requests, with one argument changed."""
    arguments: dict[str, Any] = {
        "block_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32),
        "seq_lens": ints(70, 10),
        "gather_lens": ints(6, 10),
        "out": torch.full((2, 12, 512), 7.0, dtype=torch.bfloat16),
        "offset": 2,
    }
    arguments |= changes
    gather_kv(cache, **arguments, validate=validate)
    out: torch.Tensor = arguments["out"]
    return out


def test_a_legal_gather(cache: DeepseekV4SWACache) -> None:
    write_kv(keys(2), cache, slots(65, 128))  # position 65 of request 0, position 0 of request 1
    out = call(cache, validate=True)
    assert out[0, :, 0].tolist() == [7, 7, 0, 1, 0, 0, 0, 0, 7, 7, 7, 7]
    assert out[1, :, 0].tolist() == [7, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_table", torch.zeros(2, 2, dtype=torch.int64)),
        ("block_table", torch.zeros(2, dtype=torch.int32)),
        ("block_table", torch.zeros(2, 2, dtype=torch.int32).T),
        ("block_table", None),
        ("seq_lens", torch.tensor([70, 10])),
        ("seq_lens", ints(70)),
        ("seq_lens", ints(70, 10, 3)),
        ("gather_lens", torch.tensor([6, 10])),
        ("gather_lens", ints(6)),
        ("out", torch.zeros(2, 12, 512)),
        ("out", torch.zeros(1, 12, 512, dtype=torch.bfloat16)),
        ("out", torch.zeros(2, 12, 448, dtype=torch.bfloat16)),
        ("out", torch.zeros(2, 12, 1024, dtype=torch.bfloat16)[:, :, :512]),
        ("out", torch.zeros(24, 512, dtype=torch.bfloat16)),
        ("out", torch.zeros(1, 12, 512, dtype=torch.bfloat16).expand(2, 12, 512)),
        ("out", torch.zeros(2, 12, 512, dtype=torch.bfloat16, device="meta")),
        ("offset", -1),
        ("offset", 13),
        ("offset", 2.0),
        ("offset", True),
    ],
)
def test_gather_refuses_other_forms(cache: DeepseekV4SWACache, field: str, value: Any) -> None:
    out = torch.full((2, 12, 512), 7.0, dtype=torch.bfloat16)
    with pytest.raises(BatchError) as error:
        call(cache, **({"out": out} | {field: value}))
    assert error.value.field == field
    assert out.eq(7).all()


def test_an_empty_gather(cache: DeepseekV4SWACache) -> None:
    nothing = torch.zeros(0, 2, dtype=torch.int32)
    out = torch.zeros(0, 4, 512, dtype=torch.bfloat16)
    call(cache, block_table=nothing, seq_lens=ints(), gather_lens=None, out=out, validate=True)
    assert call(cache, gather_lens=ints(0, 0), validate=True).eq(7).all()
    assert call(cache, offset=12).eq(7).all()


def test_a_table_without_columns_gives_zero_rows(cache: DeepseekV4SWACache) -> None:
    cache.pages.data[:] = 0xFF
    out = call(cache, block_table=torch.zeros(2, 0, dtype=torch.int32))
    assert out[0, :, 3].tolist() == [7, 7, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7]


def test_positions_before_the_first_give_zero_rows(cache: DeepseekV4SWACache) -> None:
    write_kv(keys(SLOTS), cache, torch.arange(SLOTS))
    out = call(cache, gather_lens=ints(6, 12), offset=0)
    assert out[1, :, 0].tolist() == [0, 0] + [1] * 10
    assert out[0, :, 0].tolist() == [1] * 6 + [7] * 6


def test_requests_of_the_workspace_may_lie_apart(cache: DeepseekV4SWACache) -> None:
    whole = torch.full((2, 20, 512), 7.0, dtype=torch.bfloat16)
    call(cache, out=whole[:, 4:16])
    assert whole[1, :, 0].tolist() == [7] * 6 + [0] * 10 + [7] * 4


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("seq_lens[1]", {"seq_lens": ints(70, -1)}),
        ("seq_lens[0]", {"seq_lens": ints(129, 10)}),
        ("gather_lens[1]", {"gather_lens": ints(6, -1)}),
        ("gather_lens[0]", {"gather_lens": ints(71, 10)}),
        ("gather_lens[1]", {"gather_lens": ints(6, 10), "offset": 3}),
        ("seq_lens[0]", {"gather_lens": None}),
        ("block_table[0, 1]", {"block_table": torch.tensor([[0, 3], [2, -1]], dtype=torch.int32)}),
        ("block_table[1, 0]", {"block_table": torch.tensor([[0, 1], [2**31 - 1, -1]], dtype=torch.int32)}),
    ],
)
def test_values_that_validation_refuses(cache: DeepseekV4SWACache, field: str, changes: dict[str, Any]) -> None:
    out = torch.full((2, 12, 512), 7.0, dtype=torch.bfloat16)
    with pytest.raises(ValidationError) as error:
        call(cache, validate=True, out=out, **changes)
    assert error.value.field == field
    assert out.eq(7).all()


def test_columns_that_are_not_read_are_not_validated(cache: DeepseekV4SWACache) -> None:
    # Positions 64..69 of request 0 and 0..9 of request 1: columns (0, 0) and (1, 1) hold rubbish.
    call(cache, validate=True, block_table=torch.tensor([[99, 1], [2, 99]], dtype=torch.int32))
