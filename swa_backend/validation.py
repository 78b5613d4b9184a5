"""The value rules of a batch, checked only in validation mode: they read the device.

An error names the field, and the request, token or column at fault; see `swa_backend.problems` for counting them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swa_backend._math import cdiv
from swa_backend.batch import CommonAttentionMetadata
from swa_backend.buffers import GroupPages
from swa_backend.capture import capture_id
from swa_backend.config import VALIDATE_VARIABLE
from swa_backend.errors import ValidationError
from swa_backend.problems import Problem, broken
from swa_backend.split import Split
from swa_backend.step import BuildStep

if TYPE_CHECKING:
    from swa_backend.config import BackendConfig

Inputs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ValueRules:
    """What a builder's steps are checked against.

    Attributes:
        config: the builder's configuration.
        groups: its cache groups; page counts change once caches are bound.
        null_page: page number that stands for "no page" in the engine, or None.
    """

    config: BackendConfig
    groups: Sequence[GroupPages]
    null_page: int | None

    def check_batch(self, batch: CommonAttentionMetadata, split: Split, inputs: Inputs) -> None:
        """Check every value that a build relies on, those of host copies too.

        Raises:
            ValidationError: naming the field, and the request or token at fault.
        """
        if batch.num_reqs == 0:
            return
        starts, seq_lens, replay = batch.query_start_loc.cpu(), batch.seq_lens.cpu(), _host(batch.replay_start)
        _first(
            starts != batch.query_start_loc_cpu,
            "query_start_loc_cpu",
            batch.query_start_loc_cpu,
            "the values of query_start_loc",
            "Copy one from the other.",
        )
        _first(
            seq_lens > batch.max_seq_len,
            "seq_lens",
            seq_lens,
            f"at most max_seq_len = {batch.max_seq_len}",
            "Pass the batch's maximum as max_seq_len.",
        )
        upper, first = batch.seq_lens_cpu_upper_bound, split.num_decodes
        if upper is not None:
            _first(upper < seq_lens, "seq_lens_cpu_upper_bound", upper, "at least seq_lens", "Pass an upper bound.")
            _first(
                upper[first:] != seq_lens[first:],
                "seq_lens_cpu_upper_bound",
                upper[first:],
                "exactly seq_lens for prefills",
                "Prefill lengths are known on the host: pass them.",
                first,
            )
        if batch.replay_start_cpu is not None:
            _first(
                batch.replay_start_cpu != (torch.zeros_like(seq_lens) if replay is None else replay),
                "replay_start_cpu",
                batch.replay_start_cpu,
                "the values of replay_start, 0 without it",
                "Pass both, or neither.",
            )
        self._check_values(starts, seq_lens, replay, inputs, batch.num_actual_tokens, batch.causal)
        longest = int((starts[1:] - starts[:-1]).max())
        if longest > batch.max_query_len:
            _refuse("max_query_len", batch.max_query_len, f">= {longest}", "Pass the batch's maximum.")

    def check_device(
        self, step: CommonAttentionMetadata | BuildStep, inputs: Inputs, num_tokens: int, most: int
    ) -> None:
        """Check what device tensors hold by now: before an update in place, or a build of fixed shape.

        Args:
            step: the step, or the batch of one.
            inputs: (block table, slot mapping) of each group.
            num_tokens: T.
            most: longest legal query.

        Raises:
            ValidationError: naming the field, and the request or token at fault.
        """
        if step.num_reqs == 0:
            return
        starts, seq_lens = step.query_start_loc.cpu(), step.seq_lens.cpu()
        limit = self.config.scheduler.max_model_len
        _first(seq_lens > limit, "seq_lens", seq_lens, f"at most max_model_len = {limit}", "End or cut the request.")
        _first(
            starts[1:] - starts[:-1] > most,
            "query_start_loc",
            starts[1:] - starts[:-1],
            f"at most {most} tokens a request, as the step was built for",
            "Build a step with longer queries anew.",
        )
        self._check_values(starts, seq_lens, _host(step.replay_start), inputs, num_tokens, step.causal)

    def _check_values(
        self,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        replay: torch.Tensor | None,
        inputs: Inputs,
        num_tokens: int,
        causal: bool,
    ) -> None:
        query_lens = starts[1:] - starts[:-1]
        if int(starts[0]) != 0:
            _refuse("query_start_loc[0]", int(starts[0]), 0, "Begin the flat token order at 0.")
        _first(
            query_lens < 0, "query_start_loc", starts[1:], "values that never fall", "Sum the query lengths in order."
        )
        if int(starts[-1]) > num_tokens:
            _refuse(
                f"query_start_loc[{len(query_lens)}]",
                int(starts[-1]),
                f"at most num_actual_tokens = {num_tokens}",
                "End with the number of real tokens.",
            )
        _first(
            seq_lens < query_lens,
            "seq_lens",
            seq_lens,
            "at least the query length",
            "Count this step's tokens in the context length.",
        )
        if replay is not None:
            _first(
                (replay < 0) | (replay > seq_lens - query_lens),
                "replay_start",
                replay,
                "0 to the prefix length",
                "Replay begins inside the prefix.",
            )
        oldest = seq_lens - query_lens - (self.config.model.window_size - (1 if causal else 0))
        if causal and replay is not None:  # a draft block sees its whole window, whatever replays
            oldest = torch.maximum(oldest, replay)
        for pages, (table, slots) in zip(self.groups, inputs, strict=True):
            self._check_group(pages, table.cpu(), slots.cpu(), starts.tolist(), oldest.clamp(min=0), seq_lens)

    def _check_group(
        self,
        pages: GroupPages,
        table: torch.Tensor,
        slots: torch.Tensor,
        starts: list[int],
        oldest: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Slots inside the cache, and a real page under every position that a live token can see."""
        name, entries, mapped = pages.name, pages.page_entries, max(starts[-1], 0)
        limit = pages.num_pages * entries
        if not pages.ratio:  # a compressed group's slots say only which tokens are real
            _first(
                slots >= limit,
                f"slot_mapping of {name}",
                slots,
                f"below {limit} slots",
                "Map tokens into the cache.",
                what="token",
                kind=Problem.SLOTS,
            )
        _first(
            slots[mapped:] >= 0,
            f"slot_mapping of {name}",
            slots[mapped:],
            "-1 for padding",
            "Give tokens past query_start_loc[-1] the slot -1.",
            mapped,
            what="token",
            kind=Problem.SLOTS,
        )
        begin, end = (torch.zeros_like(seq_lens), seq_lens // pages.ratio) if pages.ratio else (oldest, seq_lens)
        for request in range(len(seq_lens)):
            if not bool((slots[starts[request] : starts[request + 1]] >= 0).any()):
                continue
            first, last = int(begin[request]) // entries, cdiv(int(end[request]), entries)
            field = f"block table of {name}, request {request}"
            if last > table.shape[1]:
                _refuse(
                    field,
                    f"{table.shape[1]} columns",
                    f"at least {last}",
                    "Pass as many columns as the context has pages.",
                    Problem.PAGES,
                )
            live = table[request, first:last]
            _first(
                (live < 0) | (live >= pages.num_pages),
                field,
                live,
                f"page numbers from 0 to {pages.num_pages - 1}",
                "Keep every page in the live window allocated.",
                first,
                what="column",
                kind=Problem.PAGES,
            )
            if self.null_page is not None:
                _first(
                    live == self.null_page,
                    field,
                    live,
                    f"no null page {self.null_page} in the live window",
                    "Keep every page in the window allocated.",
                    first,
                    what="column",
                    kind=Problem.NULL_PAGES,
                )


def validating(asked: bool, tensor: torch.Tensor) -> bool:
    """Whether a call that has no builder checks values: asked to, or by the environment.

    Never while a graph is captured, which reads nothing.
    """
    return (asked or os.environ.get(VALIDATE_VARIABLE) == "1") and not capture_id(tensor)


def _host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


def _first(
    wrong: torch.Tensor,
    field: str,
    values: torch.Tensor,
    legal: str,
    fix: str,
    base: int = 0,
    what: str = "request",
    kind: Problem = Problem.LENGTHS,
) -> None:
    """Refuse the first element that is wrong; where problems are counted, all of them."""
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        error = ValidationError(f"{field}, {what} {base + at}", found=values[at].item(), legal=legal, fix=fix)
        broken(kind, error, int(wrong.sum()))


def _refuse(field: str, found: object, legal: object, fix: str, kind: Problem = Problem.LENGTHS) -> None:
    broken(kind, ValidationError(field, found=found, legal=legal, fix=fix))
