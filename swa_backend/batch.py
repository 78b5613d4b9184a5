"""The batch of one step as an engine describes it, and the checks that always run on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swa_backend.errors import BatchError

if TYPE_CHECKING:
    from swa_backend.config import SchedulerConfig

ImageSpans = Mapping[int, Sequence[tuple[int, int]]]

REQUIRED = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
)
OPTIONAL: Mapping[str, Any] = {
    "seq_lens_cpu_upper_bound": None,
    "causal": True,
    "mm_req_doc_ranges": None,
    "positions": None,
    "is_prefilling": None,
    "replay_start": None,
    "replay_start_cpu": None,
}


@dataclass
class CommonAttentionMetadata:
    """One step's batch, shared by all layers. Any object with the same attribute names serves as well.

    With R = ``num_reqs`` and T = ``num_actual_tokens``, both of which may include padding. Requests are ordered
    decodes, short extends, prefills. Device tensors are passed through, never copied.

    Attributes:
        query_start_loc: [R + 1] int32, device: first token of each request in the flat token order.
        query_start_loc_cpu: the same on the host.
        seq_lens: [R] int32, device: context length, this step's tokens included.
        num_reqs: R.
        num_actual_tokens: T.
        max_query_len: at least the largest query length.
        max_seq_len: at least the largest context length.
        block_table_tensor: [R, C] int32, device: page numbers of each request; only live columns mean anything.
        slot_mapping: [T] int64, device: where each token is written; negative = padded or foreign token.
        seq_lens_cpu_upper_bound: [R] int32, host: exact for prefills, may be too large for decodes. Needed only
            with prefills.
        causal: False only for a draft step whose block sees itself whole.
        mm_req_doc_ranges: request number in the batch -> inclusive absolute positions (first, last) of its images.
        positions: [T], device; not needed, positions follow from the lengths.
        is_prefilling: [R] bool, host; needed only when short extends are not decodes.
        replay_start: [R] int32, device: first position that a replayed prefix has in the cache; None = zeros.
        replay_start_cpu: the same on the host, where known; it makes the prefill workspace smaller.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    causal: bool = True
    mm_req_doc_ranges: ImageSpans | None = None
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    replay_start: torch.Tensor | None = None
    replay_start_cpu: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Any) -> CommonAttentionMetadata:
        """Take over another object's attributes by name; one of this class is returned as it is.

        Raises:
            BatchError: a required attribute is missing.
        """
        if isinstance(batch, cls):
            return batch
        missing = [name for name in REQUIRED if not hasattr(batch, name)]
        if missing:
            raise BatchError(
                "common_attn_metadata",
                found=f"a {type(batch).__name__} without {', '.join(missing)}",
                legal=f"an object with {', '.join(REQUIRED)}",
                fix="Pass a CommonAttentionMetadata, or an object with its attribute names.",
            )
        values = {name: getattr(batch, name) for name in REQUIRED}
        values.update({name: getattr(batch, name, default) for name, default in OPTIONAL.items()})
        return cls(**values)


def check_tensor(field: str, tensor: object, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse a tensor whose type, dtype, device, shape or innermost stride is not the one expected.

    A length of -1 in ``shape`` accepts any. Nothing is converted, so that an engine's buffer is never copied silently.

    Raises:
        BatchError: naming ``field``.
    """
    if isinstance(tensor, torch.Tensor):
        have = tensor.shape
        if tensor.dtype is dtype and (have == shape or _fits(have, shape)):
            if tensor.device == device and tensor.is_contiguous():
                return  # what nearly every call finds
            if _same_device(tensor.device, device) and (tensor.stride(-1) == 1 or have[-1] <= 1):
                return
        found = f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
    else:
        found = type(tensor).__name__
    sizes = ", ".join("any" if size == -1 else str(size) for size in shape) + ("," if len(shape) == 1 else "")
    raise BatchError(
        field,
        found=found,
        legal=f"a {dtype} tensor of shape ({sizes}) on {device}, last dimension contiguous",
        fix="Pass the tensor in that form; other dtypes, shapes and devices are never converted.",
    )


def _fits(have: torch.Size, shape: tuple[int, ...]) -> bool:
    if len(have) != len(shape):
        return False
    for size, want in zip(have, shape, strict=True):  # noqa: SIM110  # a generator costs twice as much
        if size != want and want != -1:
            return False
    return True


def _same_device(found: torch.device, expected: torch.device) -> bool:
    return found.type == expected.type and (
        found.index == expected.index or expected.index is None or found.index is None
    )


_HOST = torch.device("cpu")


def check_batch(batch: CommonAttentionMetadata, *, device: torch.device, scheduler: SchedulerConfig) -> None:
    """The checks that run on every step, without reading the device: types, dtypes, devices, shapes, capacities.

    Raises:
        BatchError: naming the field.
    """
    num_reqs, num_tokens = batch.num_reqs, batch.num_actual_tokens
    if not (
        type(num_reqs) is type(num_tokens) is type(batch.max_query_len) is type(batch.max_seq_len) is int
        and type(batch.causal) is bool
        and 0 <= num_reqs <= scheduler.max_num_seqs
        and 0 <= num_tokens <= scheduler.max_num_batched_tokens
        and 0 <= batch.max_query_len <= scheduler.max_num_batched_tokens
        and 0 <= batch.max_seq_len <= scheduler.max_model_len
    ):
        _refuse_numbers(batch, scheduler)
    if not _tensors_are_as_usual(batch, num_reqs, num_tokens, device):
        _check_tensors(batch, num_reqs, num_tokens, device)
    mapped = batch.query_start_loc_cpu[-1].item()
    if not 0 <= mapped <= num_tokens:
        raise BatchError(
            "query_start_loc_cpu",
            found=f"{mapped} tokens at its end",
            legal=f"0 to num_actual_tokens = {num_tokens}",
            fix="Make its last entry the number of real tokens; padding comes after it.",
        )


def _tensors_are_as_usual(batch: CommonAttentionMetadata, num_reqs: int, num_tokens: int, device: torch.device) -> bool:
    """What nearly every step is, in as few operations as possible; False means only that a closer look is needed."""
    starts, lens, table = batch.query_start_loc, batch.seq_lens, batch.block_table_tensor
    starts_cpu, lens_cpu, slots = batch.query_start_loc_cpu, batch.seq_lens_cpu_upper_bound, batch.slot_mapping
    try:
        return (
            batch.replay_start is batch.replay_start_cpu is None
            and starts.dtype is starts_cpu.dtype is lens.dtype is table.dtype is torch.int32
            and slots.dtype is torch.int64
            and starts.shape == starts_cpu.shape == (num_reqs + 1,)
            and lens.shape == (num_reqs,)
            and table.shape == (num_reqs, table.shape[-1])
            and slots.shape == (num_tokens,)
            and starts.device == lens.device == table.device == slots.device == device
            and starts_cpu.device == _HOST
            and starts.is_contiguous()
            and starts_cpu.is_contiguous()
            and lens.is_contiguous()
            and slots.is_contiguous()
            and table.stride(-1) == 1
            and (
                lens_cpu is None
                or (
                    lens_cpu.dtype is torch.int32
                    and lens_cpu.shape == (num_reqs,)
                    and lens_cpu.device == _HOST
                    and lens_cpu.is_contiguous()
                )
            )
        )
    except AttributeError:  # not tensors
        return False


def _check_tensors(batch: CommonAttentionMetadata, num_reqs: int, num_tokens: int, device: torch.device) -> None:
    check_tensor("query_start_loc", batch.query_start_loc, torch.int32, (num_reqs + 1,), device)
    check_tensor("query_start_loc_cpu", batch.query_start_loc_cpu, torch.int32, (num_reqs + 1,), _HOST)
    check_tensor("seq_lens", batch.seq_lens, torch.int32, (num_reqs,), device)
    check_tensor("block_table_tensor", batch.block_table_tensor, torch.int32, (num_reqs, -1), device)
    check_tensor("slot_mapping", batch.slot_mapping, torch.int64, (num_tokens,), device)
    if batch.seq_lens_cpu_upper_bound is not None:
        check_tensor("seq_lens_cpu_upper_bound", batch.seq_lens_cpu_upper_bound, torch.int32, (num_reqs,), _HOST)
    if batch.replay_start is not None:
        check_tensor("replay_start", batch.replay_start, torch.int32, (num_reqs,), device)
    if batch.replay_start_cpu is not None:
        check_tensor("replay_start_cpu", batch.replay_start_cpu, torch.int32, (num_reqs,), _HOST)


def _refuse_numbers(batch: CommonAttentionMetadata, scheduler: SchedulerConfig) -> None:
    """Say which number is wrong; returns if they are ints of another class."""
    for field in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
        value = getattr(batch, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise BatchError(field, found=repr(value), legal="an int >= 0", fix="Pass the host value as a Python int.")
    if not isinstance(batch.causal, bool):
        raise BatchError("causal", found=repr(batch.causal), legal="True or False", fix="Pass a Python bool.")
    _capacity("num_reqs", batch.num_reqs, scheduler.max_num_seqs, "max_num_seqs")
    _capacity("num_actual_tokens", batch.num_actual_tokens, scheduler.max_num_batched_tokens, "max_num_batched_tokens")
    _capacity("max_query_len", batch.max_query_len, scheduler.max_num_batched_tokens, "max_num_batched_tokens")
    _capacity("max_seq_len", batch.max_seq_len, scheduler.max_model_len, "max_model_len")


def _capacity(field: str, value: int, limit: int, name: str) -> None:
    if value > limit:
        raise BatchError(
            field,
            found=value,
            legal=f"at most {name} = {limit}",
            fix=f"Split the step, or construct the builder with a larger {name}: its buffers are sized by it.",
        )
