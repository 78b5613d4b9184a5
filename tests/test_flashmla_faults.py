"""A launch that fails in the middle of FlashMLA's forward: the same step attends rightly afterwards. Fake kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

for helper in ("attention_scene", "flashmla_fake"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.reference.combine import combine_rows  # noqa: E402
from swa_backend.reference.operations import ReferenceOperations  # noqa: E402
from swa_platform_cuda.flashmla_provider import RowTools  # noqa: E402
from swa_platform_cuda.flashmla_rows_reference import (  # noqa: E402
    entries_of_slots,
    entry_bounds,
    mark_columns,
    tidy_rows,
)
from tests.attention_scene import ProviderUnderTest, check, mixed  # noqa: E402
from tests.flashmla_fake import FakeKernels, fake_backend  # noqa: E402


class LaunchError(Exception):
    """As a driver reports it."""


class Failing:
    """Device work of which one launch fails."""

    def __init__(self) -> None:
        self.launches = 0
        self.fails_at: int | None = None

    def launch(self, function: Any) -> Any:
        def launched(*args: Any, **options: Any) -> Any:
            self.launches += 1
            if self.launches - 1 == self.fails_at:
                raise LaunchError
            return function(*args, **options)

        return launched

    def tools(self) -> RowTools:
        operations = ReferenceOperations()
        operations.gather_kv = self.launch(operations.gather_kv)  # type: ignore[misc]
        functions = (tidy_rows, mark_columns, entries_of_slots, entry_bounds, combine_rows)
        return RowTools(*map(self.launch, functions), operations)  # type: ignore[arg-type]


LAYERS = {"swaonly": None, "c4a": (4, "fp8_ds_mla", 256), "c128a": (128, "fp8_ds_mla", 256)}


@pytest.mark.parametrize("second", LAYERS.values(), ids=LAYERS)
def test_any_launch_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: Any) -> None:
    monkeypatch.delenv("SWA_BACKEND_ATTENTION", raising=False)
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    work, kernels = Failing(), FakeKernels()
    kernels_of = {"decode": work.launch(kernels.decode), "prefill": work.launch(kernels.prefill)}
    monkeypatch.setattr(kernels, "decode", kernels_of["decode"])
    monkeypatch.setattr(kernels, "prefill", kernels_of["prefill"])
    with fake_backend(tmp_path, kernels, tools=work.tools()) as backend:
        scene = mixed(ProviderUnderTest("flashmla", backend, "cpu"), second=second)
        compressed, seen = None, None
        if second is not None and second[0] == 128:
            group = scene.metadata.compressed["second"]
            compressed = (scene.second_cache, group.rows, group.lens)
        elif second is not None:
            compressed = scene.topk(torch.arange(64).repeat(scene.tokens, 1))
        if second is not None:
            seen = []
            for t in range(scene.tokens):
                request, position = scene.token(t)
                complete = (position + 1) // second[0]
                entries = scene.entries[request][: min(complete, 64)]
                seen.append(torch.cat([scene.window(t), entries]))
        expected = scene.expected(seen)
        work.launches = 0
        scene.run(compressed=compressed)
        total = work.launches
        assert total >= 4
        for number in range(total):
            scene.metadata = scene.build()
            if second is not None and second[0] == 128:
                group = scene.metadata.compressed["second"]
                compressed = (scene.second_cache, group.rows, group.lens)
            elif second is not None:
                compressed = scene.topk(torch.arange(64).repeat(scene.tokens, 1))
            for name, buffer in scene.builder.provider._workspace(scene.device)._buffers.items():
                if "sinks" not in name:  # they stay from step to step
                    buffer.fill_(torch.nan if buffer.is_floating_point() else 5)
            work.launches, work.fails_at = 0, number
            with pytest.raises(LaunchError):
                scene.run(compressed=compressed)
            work.fails_at = None
            check(scene.run(compressed=compressed), expected)
