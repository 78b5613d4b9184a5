"""Memory plans against numbers computed by hand from the page sizes of the specification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend.cache import CompressedCache, DeepseekV4SWACache
from swa_backend.cli import main
from swa_backend.config import BackendConfig, ModelConfig, SchedulerConfig
from swa_backend.errors import ConfigError
from swa_backend.layer_types import LayerType
from swa_backend.plan_memory import MemoryPlan, parse_size, plan_memory
from swa_backend.registry import get_backend
from tests.support import make_config

CONFIGS = Path(__file__).parent / "golden" / "configs"
GIB = 1024**3


def planned(model: str, memory: int = 80 * GIB, compressed_page_tokens: int = 256, **options: Any) -> MemoryPlan:
    drafts = options.pop("draft_layers", False)
    config = BackendConfig(ModelConfig.packaged(model), SchedulerConfig(1_048_576, 256, 8192), **options)
    return plan_memory(config, memory, compressed_page_tokens, draft_layers=drafts)


def table(plan: MemoryPlan) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {(one.layer_type.value, one.cache): (one.layers, one.caches, one.page_bytes) for one in plan.caches}


def test_v4_flash() -> None:
    """43 layers: 2 swaonly, 21 c4a, 20 c128a. Pages of 64 tokens: 37,440; 64 entries: 37,440; 2 entries: 1,728."""
    plan = planned("V4-Flash")
    assert table(plan) == {
        ("swaonly", "window"): (2, 2, 37_440),
        ("c4a", "window"): (21, 21, 37_440),
        ("c4a", "compressed"): (21, 21, 37_440),
        ("c128a", "window"): (20, 20, 37_440),
        ("c128a", "compressed"): (20, 20, 1_728),
    }
    assert float(plan.bytes_per_token("window")) == 43 * 585
    assert float(plan.bytes_per_token("compressed")) == 21 * 146.25 + 20 * 6.75
    assert float(plan.bytes_per_token()) == 28_361.25
    # 256 tokens: 4 window pages in 43 caches, a page in 21 and 20: 7,260,480 bytes; 80 GiB hold 11,831 such blocks.
    assert plan.kept_tokens == 11_831 * 256 == 3_028_736
    # A request of 4096 tokens holds 16 pages in each compressed cache. Its window, 127 tokens and the new one, lies in
    # at most 3 pages: 21 * 16 * 37,440 + 20 * 16 * 1,728 + 43 * 3 * 37,440 = 17,962,560.
    fit = plan.fits[0]
    assert (fit.context, fit.bytes_per_request, fit.requests, fit.tokens) == (4096, 17_962_560, 4782, 4782 * 4096)
    assert [fit.context for fit in plan.fits] == [4096, 32_768, 131_072, 1_048_576]
    # 4 longest contexts: (1,048,576 / 4 entries + 128 + 8192) rows of 1024 bytes each.
    assert plan.workspace == 4 * (262_144 + 128 + 8192) * 1024


def test_v4_pro_has_no_window_layer_but_in_its_drafts() -> None:
    """61 trunk layers: 30 c4a, 31 c128a; one draft layer, swaonly."""
    assert table(planned("V4-Pro")) == {
        ("c4a", "window"): (30, 30, 37_440),
        ("c4a", "compressed"): (30, 30, 37_440),
        ("c128a", "window"): (31, 31, 37_440),
        ("c128a", "compressed"): (31, 31, 1_728),
    }
    with_drafts = table(planned("V4-Pro", draft_layers=True))
    assert with_drafts["swaonly", "window"] == (1, 1, 37_440)


def test_v41_counts_shared_sources_once() -> None:
    """40 layers: 2 swaonly, 18 c2a that read the entries of layers 2, 8 and 14, 20 c1a that read those of layer 20."""
    plan = planned("V4.1-Flash")
    assert table(plan) == {
        ("swaonly", "window"): (2, 2, 37_440),
        ("c2a", "window"): (18, 18, 37_440),
        ("c2a", "compressed"): (18, 3, 128 * 528),
        ("c1a", "window"): (20, 20, 37_440),
        ("c1a", "compressed"): (20, 1, 256 * 528),
    }
    assert float(plan.bytes_per_token("compressed")) == 3 * 264 + 528
    assert float(plan.bytes_per_token("window")) == 40 * 585


@pytest.mark.parametrize(("page_tokens", "page_bytes"), [(32, 19_008), (64, 37_440), (128, 74_880), (256, 149_760)])
def test_page_sizes_of_the_specification(page_tokens: int, page_bytes: int) -> None:
    assert table(planned("V4-Flash", page_tokens=page_tokens))["swaonly", "window"][2] == page_bytes


@pytest.mark.parametrize(
    ("layout", "compressed", "window_page", "c4a_page"),
    [
        ("fp8_ds_mla_v41", "fp4_ds_mla_v41", 64 * 528, 64 * 288),
        ("bf16", "bf16", 64 * 1024, 64 * 1024),
        ("fp8_per_tensor", "fp8_per_tensor", 64 * 512, 64 * 512),
    ],
)
def test_layouts(layout: str, compressed: str, window_page: int, c4a_page: int) -> None:
    found = table(planned("V4-Flash", cache_layout=layout, compressed_layout=compressed))
    assert (found["c4a", "window"][2], found["c4a", "compressed"][2]) == (window_page, c4a_page)


def test_the_same_as_the_specs_of_the_caches() -> None:
    plan, backend = planned("V4.1-Flash"), get_backend("cpu")
    config = BackendConfig(ModelConfig.packaged("V4.1-Flash"), SchedulerConfig(1024, 1, 1024))
    window = DeepseekV4SWACache(512, 128, torch.uint8, "window", None, backend).get_kv_cache_spec(config)
    for one in plan.caches:
        spec = window
        if one.cache == "compressed":
            cache = CompressedCache(one.layer_type.ratio, config.compressed_layout, 256, "x", None, backend)
            spec = cache.get_kv_cache_spec(config)
        assert (one.page_bytes, one.entries) == (spec.page_size_bytes, spec.entries_per_page)


def test_a_longer_step_holds_more_window_pages() -> None:
    """127 tokens before the first of k + 1: with k = 66 one page of 64 more than with none."""
    one = planned("V4-Flash").caches[0]
    assert [one.pages_of(tokens, 1) for tokens in (1, 64, 65, 129, 100_000)] == [1, 1, 2, 3, 3]
    assert [one.pages_of(100_000, step) for step in (2, 3, 66, 67)] == [3, 4, 4, 5]


def test_slots_limit_what_fits() -> None:
    """A cache has fewer than 2^31 slots, however much memory there is."""
    plan = planned("V4-Flash", memory=2**60, compressed_page_tokens=256)
    assert plan.kept_tokens == (2**31 - 1) // 64 * 64 // 256 * 256


def test_one_that_is_too_small() -> None:
    plan = planned("V4-Flash", memory=1000)
    assert (plan.kept_tokens, plan.fits[0].requests, plan.fits[0].tokens) == (0, 0, 0)


@pytest.mark.parametrize("sources", [(3,), (2, 5)])
def test_a_layer_without_a_source_is_refused(sources: tuple[int, ...]) -> None:
    """Layers 2, 3, 4 are c4a and 5 is c128a: neither may read what layer 3 or, past it, layer 5 makes."""
    config = make_config(compress_ratios=(0, 0, 4, 4, 4, 128, 4))
    object.__setattr__(config.model, "kv_source_layer_ids", sources)
    with pytest.raises(ConfigError, match="kv_source_layer_ids: found") as error:
        plan_memory(config, GIB)
    layer = "layer 2 (c4a) would read none" if sources == (3,) else "layer 6 (c4a) would read entries of a c128a layer"
    assert layer in error.value.found


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000), ("80GiB", 80 * GIB), ("80gib", 80 * GIB), ("141GB", 141 * 10**9), ("141 G", 141 * 10**9),
        ("0.5 MiB", 2**19), ("2TiB", 2**41), ("64K", 64_000), ("10B", 10),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-5GiB", "0", "0.1", "80 gigabytes", "1e9", "80GiBs", "nan", "9" * 60, "٣GB"]
)
def test_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="memory: found"):
        parse_size(text)


class TestCommand:
    def test_table(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["plan-memory"]) == 0
        text = capsys.readouterr().out
        assert "\u2026" not in text
        for words in ("28,361.25", "146.25", "3,028,736", "17,962,560", "1,107,820,544 bytes"):
            assert words in text
        assert main(["plan-memory", "--model", "v4.1-flash"]) == 0
        assert "Layers that share compressed entries read one cache." in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("columns", ["40", "60"])
    def test_narrow_terminals_lose_no_digit(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["plan-memory"]) == 0
        text = capsys.readouterr().out
        assert "\u2026" not in text
        # The last column, put together again.
        cells = [line.split("\u2502")[-2].strip() for line in text.splitlines() if line.count("\u2502") > 5]
        assert "12,285" in "".join(cells)
        assert "28,361.25" in "".join(cells)

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan-memory", "--memory", "80GiB", "--json", "--max-model-len", "8192", "--drafts", "2"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["bytes_per_token"] == {"window": 25_155.0, "compressed": 3_206.25, "all": 28_361.25}
        assert report["caches"][2]["bytes_per_token"] == 146.25
        assert [fit["context"] for fit in report["fits"]] == [4096, 8192]
        # Three tokens a step reach one page further: 4 window pages.
        assert report["fits"][0]["bytes_per_request"] == 13_132_800 + 43 * 4 * 37_440

    @pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
    def test_every_config(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan-memory", "--model", str(path), "--draft-layers", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        raw = json.loads(path.read_text())
        layers = sum(one["layers"] for one in report["caches"] if one["cache"] == "window")
        listed = len(raw["compress_ratios"]) if "compress_ratios" in raw else raw["num_hidden_layers"] + 1
        assert layers == listed
        assert report["bytes_per_token"]["window"] == layers * 585

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--memory", "lots"], "memory: found 'lots'"),
            (["--model", "no/such"], "model config: found 'no/such': No such file"),
            (["--page-tokens", "48"], "page_tokens: found 48"),
            (["--compressed-page-tokens", "64"], "compressed_page_tokens: found 64; legal: a positive multiple of 128"),
            (["--cache-layout", "fp4_ds_mla_v41"], "cache_layout: found 'fp4_ds_mla_v41'"),
            (["--max-model-len", "2000000"], "max_model_len: found 2000000"),
            (["--page-tokens", "x"], "Invalid value for '--page-tokens'"),
        ],
    )
    def test_refusals(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan-memory", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in " ".join(err.split())
        assert LayerType.C4A.value not in out
