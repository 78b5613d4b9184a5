"""Keys into a cache, and back: the public functions check, the cache's platform does the work."""

from __future__ import annotations

import torch

from swa_backend.batch import check_tensor
from swa_backend.cache import PagedCache
from swa_backend.cache_layout import HEAD_DIM
from swa_backend.errors import BatchError, CacheError, ValidationError
from swa_backend.pages import PageView
from swa_backend.problems import Problem, broken
from swa_backend.validation import validating


def write_kv(k: torch.Tensor, cache: PagedCache, slot_mapping: torch.Tensor, *, validate: bool = False) -> None:
    """Quantise keys by the cache's layout and store them in their slots.

    Args:
        k: [>= T, 512] bf16 with RoPE applied, rows any distance apart; rows past T are not read. NaN or infinity is
            the caller's error: its group of values, with its scale, is stored as NaN.
        cache: a bound `DeepseekV4SWACache` or `CompressedCache`; ``fp4_ds_mla_v41`` is read only.
        slot_mapping: [T] int64, slot of each token. A negative slot, or one past the cache, stores nothing; of equal
            slots one wins as a whole.
        validate: check values as well (a device read); also on when ``SWA_BACKEND_VALIDATE=1``.

    Raises:
        CacheError: not a cache, not bound, or read only.
        BatchError: a dtype, device, shape or stride is wrong; nothing was written.
        ValidationError: in validation mode, a slot past the cache, or a key to be stored that is not finite.
    """
    pages = _pages(cache)
    if not cache.layout.writable:
        raise CacheError(
            f"cache {cache.prefix!r}",
            found=cache.layout.name,
            legal="a layout that can be written",
            fix=f"{cache.layout.name} pages come from the engine; the library only reads them.",
        )
    check_tensor("slot_mapping", slot_mapping, torch.int64, (-1,), pages.device)
    check_tensor("k", k, torch.bfloat16, (-1, HEAD_DIM), pages.device)
    tokens = slot_mapping.shape[0]
    if k.shape[0] < tokens:
        raise BatchError(
            "k",
            found=f"{k.shape[0]} rows",
            legal=f"at least the {tokens} tokens of slot_mapping",
            fix="Pass a key for each slot; give padded tokens the slot -1.",
        )
    if not tokens:
        return
    if validating(validate, k):
        _validate_write(k[:tokens], pages, slot_mapping)
    cache.backend.operations.write_kv(k, pages, slot_mapping)


def gather_kv(
    cache: PagedCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    out: torch.Tensor,
    offset: int = 0,
    *,
    validate: bool = False,
) -> None:
    """Dequantise the last entries of each request to a workspace; its other rows are not touched.

    Position ``seq_lens[r] - L + j`` goes to ``out[r, offset + j]`` for j < L, with L = ``gather_lens[r]``. An entry
    whose page is negative, past the cache or outside the table gives a zero row. Rows past the workspace's end are not
    written. For a compressed cache all lengths count entries.

    Args:
        cache: a bound `DeepseekV4SWACache` or `CompressedCache`.
        block_table: [R, C] int32 page numbers of the cache's own group; any row stride.
        seq_lens: [R] int32 entries that each request has.
        gather_lens: [R] int32 entries to read of each; None reads all.
        out: [R, M, 512] bf16; the M rows of a request are contiguous, requests any distance apart.
        offset: first row to write.
        validate: check values as well (a device read); also on when ``SWA_BACKEND_VALIDATE=1``.

    Raises:
        CacheError: not a cache, or not bound.
        BatchError: a dtype, device, shape, stride or the offset is wrong; nothing was written.
        ValidationError: in validation mode, a length is negative, more is to be gathered than there is or than fits,
            the table is too narrow, or it names a page past the cache.
    """
    pages = _pages(cache)
    check_tensor("block_table", block_table, torch.int32, (-1, -1), pages.device)
    requests = block_table.shape[0]
    check_tensor("seq_lens", seq_lens, torch.int32, (requests,), pages.device)
    if gather_lens is not None:
        check_tensor("gather_lens", gather_lens, torch.int32, (requests,), pages.device)
    check_tensor("out", out, torch.bfloat16, (requests, -1, HEAD_DIM), pages.device)
    height = out.shape[1]
    if height > 1 and out.stride(1) != HEAD_DIM:
        raise BatchError(
            "out",
            found=f"strides {out.stride()}",
            legal=f"strides (any, {HEAD_DIM}, 1)",
            fix="Keep the rows of a request one after the other.",
        )
    if requests > 1 and out.stride(0) < height * HEAD_DIM:
        raise BatchError(
            "out",
            found=f"strides {out.stride()}: requests share memory",
            legal=f"a stride of at least {height * HEAD_DIM} from request to request",
            fix="Pass a workspace of its own, not an expanded one.",
        )
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= height:
        raise BatchError(
            "offset", found=repr(offset), legal=f"an int from 0 to {height}", fix="Pass the first row of out to write."
        )
    if not requests:
        return
    if validating(validate, out):
        _validate_gather(pages, block_table, seq_lens, gather_lens, height - offset)
    cache.backend.operations.gather_kv(pages, block_table, seq_lens, gather_lens, out, offset)


def _pages(cache: object) -> PageView:
    if not isinstance(cache, PagedCache):
        raise CacheError(
            "cache",
            found=type(cache).__name__,
            legal="a DeepseekV4SWACache or a CompressedCache",
            fix="Bind the tensor to a cache and pass that.",
        )
    return cache.pages


def _validate_write(k: torch.Tensor, pages: PageView, slot_mapping: torch.Tensor) -> None:
    past = (slot_mapping >= pages.num_slots).nonzero()
    if past.numel():
        token = int(past[0])
        error = ValidationError(
            f"slot_mapping[{token}]",
            found=int(slot_mapping[token]),
            legal=f"-1, or 0 to {pages.num_slots - 1}",
            fix="Map tokens to pages that the cache has.",
        )
        broken(Problem.SLOTS, error, past.shape[0])
    lost = ((slot_mapping >= 0) & ~k.isfinite().all(dim=1)).nonzero()
    if lost.numel():
        token = int(lost[0])
        dim = int((~k[token].isfinite()).nonzero()[0])
        error = ValidationError(
            f"k[{token}, {dim}]",
            found=float(k[token, dim]),
            legal="finite values in every token that is stored",
            fix="Look for the overflow before the cache; a key like this poisons every query that sees it.",
        )
        broken(Problem.NAN_KEYS, error, lost.shape[0])


def _validate_gather(
    pages: PageView, block_table: torch.Tensor, seq_lens: torch.Tensor, gather_lens: torch.Tensor | None, room: int
) -> None:
    lens = seq_lens if gather_lens is None else gather_lens
    name = "seq_lens" if gather_lens is None else "gather_lens"
    columns = block_table.shape[1]
    capacity = columns * pages.entries
    _refuse_first("seq_lens", seq_lens, 0, capacity, f"the table's {columns} columns of {pages.entries} entries")
    for request, (length, limit) in enumerate(zip(lens.tolist(), seq_lens.tolist(), strict=True)):
        if not 0 <= length <= min(limit, room):
            error = ValidationError(
                f"{name}[{request}]",
                found=length,
                legal=f"0 to {min(limit, room)}: {limit} entries of the request, {room} rows of out",
                fix="Gather no more than the request has and the workspace holds.",
            )
            broken(Problem.LENGTHS, error)
    column = torch.arange(columns, device=block_table.device)
    live = (column >= ((seq_lens - lens) // pages.entries)[:, None]) & (column * pages.entries < seq_lens[:, None])
    wrong = (live & (block_table >= pages.num_pages)).nonzero()
    if wrong.numel():
        request, at = (int(index) for index in wrong[0])
        error = ValidationError(
            f"block_table[{request}, {at}]",
            found=int(block_table[request, at]),
            legal=f"a page from 0 to {pages.num_pages - 1}, or -1 for none",
            fix="Pass the block table of this cache's own group.",
        )
        broken(Problem.PAGES, error, wrong.shape[0])


def _refuse_first(name: str, values: torch.Tensor, low: int, high: int, why: str) -> None:
    wrong = ((values < low) | (values > high)).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        error = ValidationError(
            f"{name}[{at}]",
            found=int(values[at]),
            legal=f"{low} to {high}: {why}",
            fix="Correct the lengths or the table.",
        )
        broken(Problem.LENGTHS, error, wrong.shape[0])
