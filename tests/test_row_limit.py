"""Field case S5: decode rows about a kernel's limit of 64, served whole, or by a provider that splits its calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swa_backend.backend import Backend
from swa_backend.provider import AttentionCall
from swa_backend.reference.provider import ReferenceAttention
from swa_backend.registry import get_backend
from tests.attention_scene import ProviderUnderTest, Scene, check

LIMIT = 64


class LimitedAttention(ReferenceAttention):
    """As if its decode kernel took 64 rows at most: every call is split, down to what it is given of the metadata."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def decode(self, call: AttentionCall) -> None:
        metadata = call.metadata
        for first in range(0, metadata.num_decode_tokens, LIMIT):
            part = slice(first, min(first + LIMIT, metadata.num_decode_tokens))
            rows = metadata.with_values(
                {
                    "decode_swa_indices": metadata.decode_swa_indices[part],
                    "decode_swa_lens": metadata.decode_swa_lens[part],
                    "is_valid_token": metadata.is_valid_token[part],
                    "num_decode_tokens": part.stop - part.start,
                }
            )
            self.calls.append(part.stop - part.start)
            second = call.compressed
            if second is not None:
                second = replace(second, rows=second.rows[part], lens=second.lens[part])
            lse = None if call.lse is None else call.lse[part]
            super().decode(replace(call, q=call.q[part], out=call.out[part], lse=lse, metadata=rows, compressed=second))


@pytest.mark.parametrize("rows", [60, 64, 65, 66])
@pytest.mark.parametrize("second", [None, (128, "fp8_ds_mla", 256)])
def test_s5_decode_rows_about_a_limit(rows: int, second: tuple[int, str, int] | None) -> None:
    limited = LimitedAttention()
    platform = replace(get_backend("cpu").platform, load_providers=lambda target: (limited,))
    seqs = [1 + 7 * i for i in range(rows)]
    results = []
    for backend in (get_backend("cpu"), Backend(platform)):
        scene = Scene(
            ProviderUnderTest("reference", backend, "cpu"), [1] * rows, seqs, heads=2, second=second,
            batch={"padding": 2}, config={"max_num_seqs": 128},
        )  # fmt: skip
        compressed, seen = None, None
        if second is not None:
            group = scene.metadata.compressed["second"]
            compressed = (scene.second_cache, group.rows, group.lens)
            keys = [torch.cat([scene.window(t), scene.entries[t][: seqs[t] // 128]]) for t in range(rows)]
            seen = [*keys, None, None]
        result = scene.run(compressed=compressed)
        check(result, scene.expected(seen))
        results.append(result)
    whole, split = results
    assert torch.equal(whole.out, split.out)
    assert torch.equal(whole.lse, split.lse)
    assert limited.calls == ([rows + 2] if rows + 2 <= LIMIT else [LIMIT, rows + 2 - LIMIT])
