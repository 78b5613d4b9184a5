"""A FlashMLA that runs on the CPU: what its two operators promise and demand, in plain PyTorch.

It shares no code with the library, and is stricter than the real one: what there would be an illegal address or a
silently wrong plan is an error here.
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from swa_backend.backend import Backend
from swa_backend.platform import Platform, Probe
from swa_platform_cuda.builder import CUDADeepseekSparseSWAMetadataBuilder
from swa_platform_cuda.flashmla_discovery import LIBRARY_VARIABLE, Finder
from swa_platform_cuda.flashmla_plan import FlashMLATileScheduler
from swa_platform_cuda.flashmla_provider import FlashMLAAttention, RowTools, triton_tools

DECODE_SCHEMA = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor? tile_scheduler_metadata, Tensor? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale, Tensor(c!)? out_=None, bool enable_batch_invariant=False)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
PREFILL_SCHEMA = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
    "Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]"
)

# What a library's bytes say of it.
V4, V41, SM90, SM100 = b"ModelType::V4]", b"ModelType::V41]", b"4sm906decode6sparse", b"5sm1006decode6sparse"
SMALL_HEADS = b"launch_small_heads"
VLLM = V4 + V41 + SM90 + SM100 + SMALL_HEADS
UPSTREAM_2026_09_30 = V41 + SM100


@dataclass
class FakeKernels:
    """The operators, and what was asked of them."""

    heads: Sequence[int] = (64, 128)
    prefill_heads: Sequence[int] = (8, 16, 32, 64, 128)
    planned: int = 0
    decodes: list[dict[str, Any]] = field(default_factory=list)
    prefills: list[dict[str, Any]] = field(default_factory=list)

    def decode(
        self, q: Any, kv: Any, indices: Any, topk_length: Any, attn_sink: Any, tile_scheduler_metadata: Any,
        num_splits: Any, extra_kv: Any, extra_indices: Any, extra_topk_length: Any, d_v: int, sm_scale: float,
        out_: Any = None, enable_batch_invariant: bool = False,
    ) -> Any:  # fmt: skip
        batch, s_q, heads, dim = q.shape
        assert heads in self.heads, f"Unsupported h_q: {heads}"
        assert (s_q, dim, d_v, q.dtype) == (1, 512, 512, torch.bfloat16)
        assert q.stride(3) == 1
        assert all(stride % 8 == 0 for stride in q.stride()[:3])
        assert q.data_ptr() % 16 == 0
        assert attn_sink.shape == (heads,)
        assert attn_sink.is_contiguous()
        assert (extra_kv is None) == (extra_indices is None) == (extra_topk_length is None)
        assert not enable_batch_invariant, "sm90 has no unsplit path"
        keys, counts = paged(kv, indices, topk_length, batch)
        lens = [topk_length]
        if extra_kv is not None:
            more, more_counts = paged(extra_kv, extra_indices, extra_topk_length, batch)
            keys, counts = torch.cat([keys, more], 1), torch.cat([counts, more_counts], 1)
            lens.append(extra_topk_length)
        plan = torch.cat([one.clone() for one in lens])
        assert (tile_scheduler_metadata is None) == (num_splits is None)
        if tile_scheduler_metadata is None:
            self.planned += 1
            tile_scheduler_metadata, num_splits = plan, torch.zeros(batch + 1, dtype=torch.int32)
        else:
            assert torch.equal(tile_scheduler_metadata, plan), "the plan was made from other lengths"
        out, lse = attend(q[:, 0], keys, counts, attn_sink, sm_scale)
        self.decodes.append({"q": q, "indices": indices, "out": out_, "extra": extra_indices, "lens": topk_length})
        if out_ is None:
            out_ = torch.empty_like(out).unsqueeze(1)
        else:
            assert out_.shape == q.shape
            assert out_.is_contiguous()
        out_[:, 0] = out
        return out_, lse.unsqueeze(2), tile_scheduler_metadata.clone(), num_splits.clone()

    def prefill(
        self,
        q: Any,
        kv: Any,
        indices: Any,
        sm_scale: float,
        d_v: int,
        attn_sink: Any,
        topk_length: Any,
        out_: Any = None,
    ) -> Any:
        tokens, heads, dim = q.shape
        assert heads in self.prefill_heads, f"Unsupported h_q: {heads}"
        assert (dim, d_v, q.dtype, kv.dtype) == (512, 512, torch.bfloat16, torch.bfloat16)
        assert kv.shape[1:] == (1, 512)
        assert indices.shape[:2] == (tokens, 1)
        assert indices.shape[2] % 128 == 0
        assert indices.stride(2) == 1
        assert attn_sink.shape == (heads,)
        rows = indices[:, 0].long()
        live = torch.arange(rows.shape[1]) < topk_length[:, None]
        inside = (rows >= 0) & (rows < kv.shape[0])
        # Rows past the length are read as well: a NaN there would reach the output.
        block = torch.arange(rows.shape[1]) < (topk_length[:, None] + 127) // 128 * 128
        keys = kv[rows.clamp(0, kv.shape[0] - 1), 0].float()
        assert not keys[block & inside & ~live].isnan().any()
        out, lse = attend(q, keys.masked_fill(~(live & inside)[..., None], 0), live & inside, attn_sink, sm_scale)
        self.prefills.append({"q": q, "indices": indices, "out": out_, "kv": kv})
        if out_ is None:
            out_ = torch.empty_like(out)
        else:
            assert out_.shape == q.shape
            assert out_.stride(2) == 1
            assert out_.is_contiguous() or heads < 64
        out_.copy_(out)
        return [out_, lse, lse.clone()]


def paged(kv: Any, indices: Any, lens: Any, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [b, w, 512] float32, which count [b, w]); an entry that is neither -1 nor in the cache is an error."""
    pages, entries, one, size = kv.shape
    assert (one, size, kv.dtype) == (1, 584, torch.uint8)
    assert kv.stride()[1:] == (584, 584, 1)
    assert indices.shape[:2] == (batch, 1)
    assert indices.shape[2] % 64 == 0
    assert indices.dtype == lens.dtype == torch.int32
    assert lens.shape == (batch,)
    assert lens.is_contiguous()
    slots = indices[:, 0].long()
    counts = torch.arange(slots.shape[1]) < lens[:, None]
    assert ((slots[counts] >= -1) & (slots[counts] < pages * entries)).all(), "an illegal memory access"
    counts &= slots >= 0
    slots = slots.where(counts, 0)
    flat = kv.as_strided((pages, entries * 584), (kv.stride(0), 1))
    page, entry = slots // entries, slots % entries
    data = flat[page[..., None], (entry * 576)[..., None] + torch.arange(576)]
    scale_bytes = flat[page[..., None], (entries * 576 + entry * 8)[..., None] + torch.arange(7)]
    scales = torch.where(scale_bytes == 255, torch.nan, 2.0 ** (scale_bytes.double() - 127)).float()
    values = data[..., :448].contiguous().view(torch.float8_e4m3fn).float()
    rope = data[..., 448:].contiguous().view(torch.bfloat16).float()
    keys = torch.cat([values * scales.repeat_interleave(64, dim=-1), rope], dim=-1)
    return keys.masked_fill(~counts[..., None], 0), counts


def attend(
    q: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, h, 512] bf16, lse [n, h]) as FlashMLA defines them: +inf where nothing was seen."""
    logits = (torch.bmm(q.float(), keys.mT) * scale).masked_fill(~counts[:, None], -torch.inf)
    seen = counts.any(dim=1)[:, None]
    peak = logits.amax(dim=-1, keepdim=True).masked_fill(~seen[..., None], 0)
    weights = (logits - peak).exp()
    total = weights.sum(dim=-1)
    out = torch.bmm(weights, keys) / (total + (sink - peak.squeeze(-1)).exp())[..., None]
    lse = (total.log() + peak.squeeze(-1)).where(seen, torch.inf)
    return out.where(seen[..., None], 0).bfloat16(), lse


@contextmanager
def registered(
    namespace: str,
    kernels: FakeKernels | None = None,
    *,
    decode: str = DECODE_SCHEMA,
    prefill: str = PREFILL_SCHEMA,
) -> Iterator[None]:
    """Operators of these schemas under a namespace of torch."""
    kernels = kernels or FakeKernels()
    library = torch.library.Library(namespace, "DEF")
    for schema, function in ((decode, kernels.decode), (prefill, kernels.prefill)):
        if schema:
            library.define(schema)
            library.impl(schema.split("(")[0], function, "CPU")
    try:
        yield
    finally:
        library._destroy()


def fake_finder(
    *,
    arch: str | None = "90",
    env: Mapping[str, str] | None = None,
    packages: Mapping[str, Path] | None = None,
    modules: Mapping[str, Any] | None = None,
    load_library: Any = lambda path: None,
    operators: Any = None,
) -> Finder:
    """A machine with these packages (name -> folder), importable modules and this chip."""
    here = Finder.here()
    imported = dict(modules or {})

    def find_spec(name: str) -> Any:
        folder = (packages or {}).get(name)
        if folder is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    def import_module(name: str) -> Any:
        module = imported.get(name)
        if isinstance(module, BaseException):
            raise module
        if module is None:
            raise ModuleNotFoundError(name)
        return module

    return Finder(
        dict(env or {}), find_spec, import_module, load_library, operators or here.operators, lambda device: arch
    )


def fake_package(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


@contextmanager
def fake_backend(
    folder: Path,
    kernels: FakeKernels,
    *,
    tools: RowTools | None = None,
    contents: bytes = VLLM,
    arch: str = "90",
    **schemas: str,
) -> Iterator[Backend]:
    """The CUDA platform's builder and FlashMLA provider on CPU tensors, over a bare library of fake operators."""
    from swa_backend.reference.combine import combine_rows
    from swa_backend.reference.operations import ReferenceOperations
    from swa_platform_cuda.flashmla_rows_reference import entries_of_slots, entry_bounds, mark_columns, tidy_rows

    path = folder / "libflashmla.so"
    path.write_bytes(contents)
    tools = tools or RowTools(
        tidy_rows, mark_columns, entries_of_slots, entry_bounds, combine_rows, ReferenceOperations()
    )
    with registered("fake_flashmla", kernels, **schemas):
        before: dict[str, Any] = {}
        seen = [before, before]

        def operators(name: str) -> Mapping[str, Any]:
            """As if the operators had come with the library."""
            found = {full: one for full, one in Finder.here().operators(name).items() if full.startswith("fake_")}
            return seen.pop() if len(seen) > 1 else found

        finder = fake_finder(arch=arch, env={LIBRARY_VARIABLE: str(path)}, operators=operators)
        provider = FlashMLAAttention(None, finder, lambda: tools)
        probe = Probe(usable=True, preferred=False, reasons=())
        yield Backend(
            Platform(
                name="fake-cuda",
                device_type="cpu",
                probe=lambda: probe,
                load_builder=lambda: CUDADeepseekSparseSWAMetadataBuilder,
                load_operations=lambda: tools.operations,
                load_scheduler=lambda target: FlashMLATileScheduler(),
                load_providers=lambda target: (provider,),
            )
        )


__all__ = ["FakeKernels", "fake_backend", "fake_finder", "fake_package", "registered", "triton_tools"]
