"""Joining attention results that were computed over parts of the keys, and applying the sink once, at the end."""

from __future__ import annotations

import torch

from swa_backend.batch import check_tensor
from swa_backend.errors import BatchError


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    Both results must have been computed with a sink of -inf: a sink that each part has already counted cannot be taken
    out again. Where both are empty the result is 0 and -inf; an ``out`` whose lse is -inf is never read.

    Args:
        out_a, out_b: [..., h, 512], both of one floating-point dtype.
        lse_a, lse_b: [..., h] float32, natural logarithms, -inf where nothing was seen.

    Returns:
        out in the dtype of the parts and lse in float32; computed in float32.

    Raises:
        BatchError: a dtype, device or shape is wrong.
    """
    _check_out("out_a", out_a)
    check_tensor("out_b", out_b, out_a.dtype, tuple(out_a.shape), out_a.device)
    check_tensor("lse_a", lse_a, torch.float32, tuple(out_a.shape[:-1]), out_a.device)
    check_tensor("lse_b", lse_b, torch.float32, tuple(out_a.shape[:-1]), out_a.device)
    peak = torch.maximum(lse_a, lse_b)
    base = peak.masked_fill(peak == -torch.inf, 0.0)
    weight_a, weight_b = (lse_a - base).exp_(), (lse_b - base).exp_()
    total = weight_a + weight_b
    out = _weighted(out_a, weight_a / total, lse_a) + _weighted(out_b, weight_b / total, lse_b)
    return out.to(out_a.dtype), total.log_().add_(base)


def apply_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """Add each head's sink to the softmax denominator of a result computed with a sink of -inf.

    ``out * sigmoid(lse - sink)``: 0 for a sink of +inf, unchanged for -inf, and 0 where nothing was seen. The lse of
    the API never holds the sink, so it stays as it is.

    Args:
        out: [..., h, 512], a floating-point dtype.
        lse: [..., h] float32, natural logarithm.
        attn_sink: [h] float32.

    Returns:
        The result in the dtype of ``out``; computed in float32.

    Raises:
        BatchError: a dtype, device or shape is wrong.
    """
    _check_out("out", out)
    check_tensor("lse", lse, torch.float32, tuple(out.shape[:-1]), out.device)
    check_tensor("attn_sink", attn_sink, torch.float32, tuple(out.shape[-2:-1]), out.device)
    return _weighted(out, torch.sigmoid(lse - attn_sink), lse).to(out.dtype)


def _weighted(out: torch.Tensor, weight: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """``out * weight`` in float32, and 0 where the lse says that nothing was seen, whatever ``out`` holds there."""
    return (out.float() * weight[..., None]).masked_fill_((lse == -torch.inf)[..., None], 0.0)


def _check_out(field: str, out: torch.Tensor) -> None:
    if not isinstance(out, torch.Tensor) or not out.dtype.is_floating_point or out.dim() < 2:
        found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise BatchError(
            field, found=found, legal="a floating-point tensor [..., h, 512]", fix="Pass the out of an attend() result."
        )
