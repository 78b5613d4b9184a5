"""The value rules of an attention call, checked only in validation mode: they read the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swa_backend.capture import capture_id
from swa_backend.errors import ValidationError
from swa_backend.problems import Problem, broken, counting

if TYPE_CHECKING:
    from swa_backend.layer_types import LayerType
    from swa_backend.metadata import DeepseekSparseSWAMetadata
    from swa_backend.pages import PageView
    from swa_backend.provider import AttentionCall

_KEYS_AT_ONCE = 4096  # rows of a cache that are dequantised at a time


def validate_call(call: AttentionCall) -> None:
    """Check sinks, plans, index rows, and that no token sees a key that is NaN.

    Nothing is checked while a graph is captured: that reads nothing.

    Raises:
        ValidationError: naming the field and the token with its request.
    """
    if capture_id(call.q):
        return
    metadata = call.metadata
    _check_sinks(call.attn_sink)
    _check_plans(metadata)
    border = metadata.num_decode_tokens
    parts = [("decode_swa", metadata.decode_swa_indices, metadata.decode_swa_lens, call.pages, 0)]
    if metadata.prefill_swa_indices is not None and metadata.prefill_swa_lens is not None:
        rows, lens = metadata.prefill_swa_indices, metadata.prefill_swa_lens
        parts.append(("prefill_swa", rows, lens, call.pages, border))
    if call.compressed is not None:
        second = call.compressed
        parts.append(("compressed", second.rows, second.lens, second.pages, 0))
        _first(
            ~metadata.is_valid_token & (second.lens != 0),
            "compressed lens of {}",
            second.lens,
            "0 for a padded token",
            "Take the lengths that map_topk or the builder made.",
            metadata,
        )
    for name, rows, lens, pages, first in parts:
        _check_rows(name, rows.reshape(lens.shape[0], rows.shape[-1]), lens, pages, first, metadata)


def _check_sinks(sinks: torch.Tensor) -> None:
    finite = torch.isfinite(sinks)
    # All at -inf is how a partial result is asked for that will be merged with another.
    if not bool(finite.all()) and not bool((sinks == -torch.inf).all()):
        head = int((~finite).int().argmax())
        error = ValidationError(
            f"attn_sink[{head}]",
            found=float(sinks[head]),
            legal="finite sinks, or -inf for every head",
            fix="Check the layer's weights.",
        )
        broken(Problem.SINKS, error, int((~finite).sum()))


def _check_plans(metadata: DeepseekSparseSWAMetadata) -> None:
    """No plan of another layer type, or of a step before this one; where problems are counted it is left away."""
    for layer_type, plan in metadata.plans.items():
        if plan is None or not _is_stale(plan, layer_type, metadata.generation):
            continue
        error = ValidationError(
            f"plans[{layer_type}]",
            found=f"a plan of {getattr(plan, 'layer_type', layer_type)} layers for build "
            f"{getattr(plan, 'generation', '?')}",
            legal=f"the plan that build {metadata.generation} made for {layer_type} layers",
            fix="Use the metadata's own plans, fresh with every build and update.",
        )
        broken(Problem.STALE_PLANS, error)
        metadata.plans = {**metadata.plans, layer_type: type(plan)(layer_type)}


def _is_stale(plan: Any, layer_type: LayerType, generation: int) -> bool:
    """Whether a plan was filled in another step, or is one of another layer type. Plans that say neither are fresh."""
    filled = getattr(plan, "shape", None) is not None
    return getattr(plan, "layer_type", layer_type) is not layer_type or (
        filled and getattr(plan, "generation", generation) != generation
    )


def _check_rows(
    name: str, rows: torch.Tensor, lens: torch.Tensor, pages: PageView, base: int, metadata: DeepseekSparseSWAMetadata
) -> None:
    """Lengths within the row, entries within the cache, keys that are numbers; row 0 is token ``base``."""
    width = rows.shape[1]
    _first(
        (lens < 0) | (lens > width),
        f"{name} lens of {{}}",
        lens,
        f"0 to the row width {width}",
        "Count no more entries than the row holds.",
        metadata,
        base,
    )
    live = torch.arange(width, device=rows.device) < lens[:, None]
    wrong = live & ((rows < -1) | (rows >= pages.num_slots))
    _first(
        wrong.any(dim=1),
        f"{name} rows of {{}}",
        torch.where(wrong, rows, -1).gather(1, wrong.int().argmax(dim=1, keepdim=True)).squeeze(1),
        f"-1, or a slot below {pages.num_slots}",
        "Build the rows for this cache, with its number of pages.",
        metadata,
        base,
    )
    valid = metadata.is_valid_token[base : base + rows.shape[0]]
    _check_keys(name, rows, live & (rows >= 0) & (rows < pages.num_slots) & valid[:, None], pages, base, metadata)


def _check_keys(
    name: str, rows: torch.Tensor, live: torch.Tensor, pages: PageView, base: int, metadata: DeepseekSparseSWAMetadata
) -> None:
    """No entry that a token sees is NaN: a page that nobody wrote, or one whose writer overflowed."""
    from swa_backend.reference.codec import dequantise_slots

    slots = rows[live].unique()  # type: ignore[no-untyped-call]
    lost = torch.zeros(pages.num_slots, dtype=torch.bool, device=rows.device)
    for some in slots.split(_KEYS_AT_ONCE):
        lost[some.long()] = dequantise_slots(pages, some).isnan().any(dim=1)
    count = int(lost.sum())
    if not count:
        return
    wrong = live & lost[rows.clamp(min=0, max=pages.num_slots - 1).long()]
    token = int(wrong.any(dim=1).int().argmax())
    column = int(wrong[token].int().argmax())
    slot = int(rows[token, column])
    error = ValidationError(
        f"{name} rows of {_whose(metadata, base + token)}",
        found=f"slot {slot} (page {slot // pages.entries}, entry {slot % pages.entries}), whose key is NaN",
        legal="keys without NaN under every entry that a token sees",
        fix="Write a page before a token sees it, and look for an overflow before the write.",
    )
    broken(Problem.NAN_ROWS, error, count)


def _whose(metadata: DeepseekSparseSWAMetadata, token: int) -> str:
    return f"token {token} (request {int(metadata.token_to_req_indices[token])})"


def _first(
    wrong: torch.Tensor,
    field: str,
    values: torch.Tensor,
    legal: str,
    fix: str,
    metadata: DeepseekSparseSWAMetadata,
    base: int = 0,
) -> None:
    """Refuse the first element that is wrong; where problems are counted, all of them."""
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        error = ValidationError(
            field.format(_whose(metadata, base + at)), found=values[at].item(), legal=legal, fix=fix
        )
        broken(Problem.ROWS, error, int(wrong.sum()) if counting() else 1)
