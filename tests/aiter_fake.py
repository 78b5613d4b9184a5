"""An aiter that runs on the CPU: the published signatures of its two functions, what they promise and demand.

It shares no code with the library, and is stricter than the real one: what there would be an illegal address, NaN or a
silent copy is an error here. `installed` lays the functions out as aiter's package does: it is found as a real one.
"""
# ruff: noqa: N803

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from swa_backend.backend import Backend
from swa_backend.platform import Platform, Probe, Target
from swa_backend.reference.operations import ReferenceOperations
from swa_backend.reference.provider import ReferenceAttention
from swa_platform_rocm.aiter_discovery import Found, find_aiter
from swa_platform_rocm.aiter_provider import AiterAttention
from swa_platform_rocm.aiter_rows_reference import ragged_rows
from swa_platform_rocm.builder import DeepseekV4ROCMAiterSparseSWAMetadataBuilder

calls: list[dict[str, Any]] = []
"""Arguments of every call since the last `calls.clear()`, with the name of the function."""


def sparse_mla_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    softmax_scale: float,
    *,
    kv_scale: torch.Tensor | None = None,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    kv_splits: int | None = None,
    skip_reduce: bool = False,
    has_invalid: bool = False,
    dot_precision: str = "bf16",
    q_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    attn_sink: torch.Tensor | None = None,
    extra_kv: torch.Tensor | None = None,
    extra_indptr: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_kv_scale: torch.Tensor | None = None,
    inv_rope_positions: torch.Tensor | None = None,
    inv_rope_cos_sin_cache: torch.Tensor | None = None,
    out_mxfp8: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    calls.append({"function": "sparse_mla_fwd", **locals()})
    assert (kv_scale, q_scale, extra_kv_scale, inv_rope_positions, inv_rope_cos_sin_cache, out_mxfp8) == (None,) * 6
    assert not return_lse, "return_lse is not supported for dsv4 / two-loop caches yet."
    assert dot_precision == "bf16"
    assert not skip_reduce, "partials would come back"
    assert kv_lora_rank > 0 <= qk_rope_head_dim
    assert kv_lora_rank + qk_rope_head_dim == q.shape[2]
    assert out is not None, "a layer's call allocates nothing"
    extra = (extra_kv, extra_indptr, extra_indices)
    _attend(q, kv_buffer, kv_indptr, kv_indices, softmax_scale, attn_sink, extra, kv_splits, has_invalid, out)
    return out, None


def pa_decode_sparse(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    kv_scales: torch.Tensor | None = None,
    block_h: int | None = None,
    kv_splits: int | None = None,
    has_invalid: bool | None = True,
    skip_reduce: bool | None = False,
    USE_EXP2: bool | None = None,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_indptr: torch.Tensor | None = None,
) -> torch.Tensor:
    calls.append({"function": "pa_decode_sparse", **locals()})
    assert (kv_scales, block_h, USE_EXP2) == (None,) * 3
    assert not skip_reduce
    out = torch.full_like(q, math.nan)
    extra = (extra_cache, extra_indptr, extra_indices)
    _attend(q, unified_kv, kv_indptr, kv_indices, softmax_scale, attn_sink, extra, kv_splits, bool(has_invalid), out)
    return out


def pa_decode_sparse_with_out(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    kv_scales: torch.Tensor | None = None,
    block_h: int | None = None,
    kv_splits: int | None = None,
    has_invalid: bool | None = True,
    skip_reduce: bool | None = False,
    USE_EXP2: bool | None = None,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_indptr: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    calls.append({"function": "pa_decode_sparse_with_out", **locals()})
    assert out is not None, "a layer's call allocates nothing"
    extra = (extra_cache, extra_indptr, extra_indices)
    _attend(q, unified_kv, kv_indptr, kv_indices, softmax_scale, attn_sink, extra, kv_splits, bool(has_invalid), out)
    return out


def sparse_mla_fwd_without_sink(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    softmax_scale: float,
    kv_scale: torch.Tensor | None = None,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    kv_splits: int | None = None,
    skip_reduce: bool = False,
    has_invalid: bool = False,
    dot_precision: str = "bf16",
    q_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As first published, for models without a sink and with one cache."""
    raise AssertionError("it cannot do what is asked here")


def pa_decode_sparse_of_a_wheel(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    kv_scales: torch.Tensor | None = None,
    block_h: int | None = None,
    kv_splits: int | None = None,
    has_invalid: bool | None = True,
    skip_reduce: bool | None = False,
    USE_EXP2: bool | None = None,
) -> torch.Tensor:
    """As in the releases up to 0.1.19: one flat pool of keys, no packed cache."""
    raise AssertionError("it cannot do what is asked here")


Segment = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _attend(
    q: torch.Tensor, kv: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, scale: float,
    sink: torch.Tensor | None, extra: Segment, splits: int | None, has_invalid: bool, out: torch.Tensor,
) -> None:  # fmt: skip
    tokens, heads, dim = q.shape
    assert (q.dtype, dim) == (torch.bfloat16, 512)
    assert q.stride(2) == out.stride(2) == 1
    assert out.shape == q.shape
    assert out.dtype == torch.bfloat16
    assert isinstance(scale, float)
    assert splits is None or (isinstance(splits, int) and splits >= 1)
    for rows in (q, out):
        assert tokens * rows.stride(0) * 2 < 2**31, "32-bit offsets"
    assert sink is not None
    assert sink.shape == (heads,)
    assert sink.dtype == torch.float32
    assert sink.is_contiguous()
    assert not sink.isinf().any(), "inf - inf"
    assert (extra[0] is None) == (extra[1] is None) == (extra[2] is None), "they go together"
    segments = [(kv, indptr, indices)] + ([extra] if extra[0] is not None else [])
    # Before anything is written: an output that overlaps an input would be seen.
    seen = [[_keys_of(*segment, t, tokens, has_invalid) for segment in segments] for t in range(tokens)]
    for t in range(tokens):
        keys = torch.cat(seen[t])
        logits = q[t].double() @ keys.T * scale
        base = torch.cat([logits, sink.double()[:, None]], dim=1).amax(dim=1, keepdim=True)
        weights = (logits - base).exp()
        total = weights.sum(dim=1, keepdim=True) + (sink.double()[:, None] - base).exp()
        out[t] = (weights @ keys / total).bfloat16()


def _keys_of(
    kv: Any, indptr: Any, indices: Any, token: int, tokens: int, has_invalid: bool
) -> torch.Tensor:  # [n, 512] float64
    pages, entries, size = kv.shape
    assert kv.dtype == torch.uint8
    assert size == 584
    assert kv.stride()[1:] == (584, 1)
    assert pages == 1 or kv.stride(0) % 576 == 0
    for flat in (indptr, indices):
        assert flat.dtype == torch.int32
        assert flat.ndim == 1
        assert flat.is_contiguous(), "it would be copied"
    assert indptr.numel() == tokens + 1
    begin, end = int(indptr[token]), int(indptr[token + 1])
    assert 0 <= begin <= end <= indices.numel()
    slots = indices[begin:end].long()
    if has_invalid:
        slots = slots[slots != -1]
    assert ((slots >= 0) & (slots < pages * entries)).all(), "an illegal memory access"
    flat_pages = kv.as_strided((pages, entries * 584), (kv.stride(0), 1))
    page, entry = (slots // entries)[:, None], (slots % entries)[:, None]
    data = flat_pages[page, entry * 576 + torch.arange(576)]
    exponents = flat_pages[page, entries * 576 + entry * 8 + torch.arange(7)].double() - 127
    values = data[:, :448].contiguous().view(torch.float8_e4m3fn).double() * (2.0**exponents).repeat_interleave(64, 1)
    return torch.cat([values, data[:, 448:].contiguous().view(torch.bfloat16).double()], dim=1)


CURRENT = "aiter/ops/triton/attention/sparse_mla.py"
OLD = "aiter/ops/triton/attention/pa_decode_sparse.py"
STRIDE_FIX = "def max_addressable_bytes(tensor): pass\n"


def from_here(name: str, function: str, more: str = "") -> str:
    """Source of a module that has one of the functions above under its published name."""
    return f"from tests.aiter_fake import {function} as {name}\n{more}"


PRESENT = {CURRENT: from_here("sparse_mla_fwd", "sparse_mla_fwd")}
ONLY_OLD = {OLD: from_here("pa_decode_sparse", "pa_decode_sparse", STRIDE_FIX)}


@contextmanager
def installed(folder: Path, files: Mapping[str, str]) -> Iterator[None]:
    """A package of these modules (path -> source) on the path; ``aiter/__init__.py`` may be among them."""
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for parent in path.relative_to(folder).parents:
            package = folder / parent / "__init__.py"
            if str(parent) != "." and not package.exists():
                package.write_text("")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in imported():
            del sys.modules[name]


def imported() -> list[str]:
    """What is imported of aiter."""
    return [name for name in sys.modules if name.partition(".")[0] == "aiter"]


def fake_backend(
    *,
    arch: str | None = "gfx950",
    target: str | None = None,
    find: Callable[[], Found] = find_aiter,
    others: Sequence[Any] = (ReferenceAttention(),),
) -> Backend:
    """The ROCm platform's builder and aiter provider on CPU tensors, as on a machine with such a device."""
    chip = None if target is None else Target.parse(target)
    provider = AiterAttention(chip, others, find, lambda: ragged_rows, lambda device: arch)
    probe = Probe(usable=True, preferred=False, reasons=())
    rocm = Platform(
        name="fake-rocm",
        device_type="cpu",
        probe=lambda: probe,
        load_builder=lambda: DeepseekV4ROCMAiterSparseSWAMetadataBuilder,
        load_operations=ReferenceOperations,
        load_scheduler=lambda target: no_plans,  # type: ignore[arg-type, return-value]
        load_providers=lambda target: (provider, *others),
    )
    return Backend(rocm)


def no_plans(*_: Any) -> None:
    raise AssertionError("aiter takes no plans")
