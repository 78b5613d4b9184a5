"""The replay end to end on small traces, what it reports, and that it sees planted faults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend import cli
from swa_backend.backend import Backend
from swa_backend.errors import ConfigError, PlatformError, TraceError
from swa_backend.metadata import DeepseekSparseSWAMetadata
from swa_backend.provider import AttentionCall
from swa_backend.reference.operations import ReferenceOperations
from swa_backend.registry import get_backend
from swa_backend.replay import ReplayOptions, ReplayReport, run_replay

MODELS = ("V4-Flash", "V4-Pro", "V4-Flash-Vision-Exp", "V4.1-Flash")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A model with few heads and a small top-k, so that a context of some hundred tokens has more entries than that."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 512,
        "qk_rope_head_dim": 64, "sliding_window": 128, "index_topk": 40, "max_position_embeddings": 8192,
        "compress_ratios": [0, 4, 128],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def trace(tmp_path_factory) -> Path:
    """Four requests; the second and third share a prefix of 512 tokens with the first."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [(600, 12, [1, 2]), (700, 9, [1, 3]), (530, 10, [1, 4]), (150, 14, [5])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": 0, "input_length": prompt, "output_length": output, "hash_ids": ids})
            for prompt, output, ids in rows
        )
    )
    return path


def replay(trace: Path, model: Path, **options: Any) -> ReplayReport:
    return run_replay(ReplayOptions(**{"trace": trace, "model": model, "verify": "all", **options}))


PROMPTS, OUTPUTS = 600 + 700 + 530 + 150, 12 + 9 + 10 + 14
COMPUTED = PROMPTS + OUTPUTS - 4  # the last output token of a request is never computed


class TestRun:
    @pytest.mark.parametrize("data", ["exact", "arbitrary"])
    def test_everything_is_right(self, trace, model, data):
        report = replay(trace, model, data=data, max_batched_tokens=256, max_seqs=2)
        assert report.mismatches == report.output_mismatches == report.row_mismatches == 0
        assert report.examples == ()
        assert (report.requests, report.skipped_rows) == (4, 0)
        assert (report.prompt_tokens, report.output_tokens) == (PROMPTS, OUTPUTS)
        assert report.reused_tokens == 2 * 512
        assert report.prefix_reuse == 2 * 512 / PROMPTS
        assert report.tokens == report.tokens_verified == COMPUTED - 2 * 512
        assert report.rows_checked == 3 * report.tokens  # window rows, c128a rows, top-k rows
        assert 1e-3 < report.worst_error <= 4e-3  # a bf16 output cannot be nearer
        assert report.layers == ("swaonly", "c4a", "c128a")
        assert (report.platform, report.preemptions, report.rejected_drafts) == ("cpu", 0, 0)
        assert 0 < report.build.p50 <= report.build.p90 <= report.build.p99 <= report.build.max
        assert 0 < report.attention.p50 <= report.attention.max < report.seconds
        assert set(report.peak_pages) == {"window", "c4a", "c128a"}
        assert all(0 < report.peak_pages[name] <= pages for name, pages in report.pages.items())

    @pytest.mark.parametrize("data", ["exact", "arbitrary"])
    def test_drafts(self, trace, model, data):
        report = replay(trace, model, data=data, drafts=3, acceptance=0.5, max_batched_tokens=256)
        assert report.mismatches == 0
        assert report.rejected_drafts > 10
        assert report.tokens == COMPUTED - report.reused_tokens + report.rejected_drafts
        assert report.tokens_verified == report.tokens  # rejected ones as well
        fewer = replay(trace, model, drafts=3, acceptance=1.0, max_batched_tokens=256)
        assert (fewer.mismatches, fewer.rejected_drafts) == (0, 0)
        assert fewer.steps < report.steps

    def test_preemption(self, tmp_path, model):
        path = tmp_path / "t.csv"
        path.write_text(HEADER + "2024-01-01 00:00:00,500,40\n" * 3)
        report = replay(path, model, pages=6, max_batched_tokens=200, verify="sampled")
        assert report.mismatches == 0
        assert report.preemptions > 0
        assert report.requests == 3
        assert report.tokens > 3 * 539  # some of them again
        assert report.peak_pages["c4a"] <= 6

    def test_one_token_requests_and_one_token_steps(self, tmp_path, model):
        path = tmp_path / "t.csv"
        path.write_text(HEADER + "2024-01-01 00:00:00,1,1\n2024-01-01 00:00:00,3,2\n")
        report = replay(path, model, max_batched_tokens=1, max_seqs=1)
        assert (report.mismatches, report.tokens, report.steps) == (0, 5, 5)

    @pytest.mark.parametrize("options", [{"page_tokens": 32}, {"page_tokens": 96}, {"page_tokens": 256, "pages": 20}])
    def test_page_sizes(self, trace, model, options):
        report = replay(trace, model, verify="sampled", max_seqs=2, **options)
        assert (report.mismatches, report.requests) == (0, 4)

    @pytest.mark.parametrize("layout", ["fp8_ds_mla_v41", "bf16", "fp8_per_tensor"])
    def test_window_layouts(self, trace, model, layout):
        report = replay(trace, model, max_requests=1, cache_layout=layout, data="arbitrary", layers=["swaonly"])
        assert report.mismatches == 0

    @pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_ds_mla_v41", "fp4_ds_mla_v41", "bf16"])
    def test_compressed_layouts(self, trace, model, layout):
        options = {"compressed_layout": layout, "data": "arbitrary", "layers": ["c4a", "c128a"]}
        report = replay(trace, model, max_requests=1, **options)
        assert report.mismatches == 0
        assert report.tokens_verified == 611

    @pytest.mark.parametrize("layers", [["swaonly"], ["c128a", "c4a"]])
    def test_layers(self, trace, model, layers):
        report = replay(trace, model, max_requests=1, layers=layers)
        assert set(report.layers) == set(layers)
        assert report.mismatches == 0
        assert report.tokens_verified == 611

    @pytest.mark.parametrize("name", MODELS)
    def test_packaged_models(self, tmp_path, name):
        path = tmp_path / "t.csv"
        path.write_text(HEADER + "2024-01-01 00:00:00,150,4\n")
        report = run_replay(ReplayOptions(trace=path, model=name, data="arbitrary", drafts=1))
        assert report.mismatches == 0
        assert report.tokens_verified > 100
        assert report.model == name
        third = {"V4.1-Flash": ("swaonly", "c1a", "c2a")}
        assert report.layers == third.get(name, ("swaonly", "c4a", "c128a"))

    def test_same_seed_same_run(self, trace, model):
        options = {"drafts": 2, "max_requests": 1, "verify": "sampled"}
        runs = [replay(trace, model, seed=seed, **options).to_dict() for seed in (1, 1, 2)]
        for run in runs:
            for timing in ("build", "attention", "seconds"):
                del run[timing]
        assert runs[0] == runs[1]
        assert runs[0]["rejected_drafts"] != runs[2]["rejected_drafts"]


class TestVerify:
    def test_sample_of_a_small_trace(self, tmp_path, model):
        path = tmp_path / "t.csv"
        path.write_text(HEADER + "2024-01-01 00:00:00,3000,5\n" * 2)
        report = replay(path, model, verify="sampled", max_batched_tokens=1000)
        assert 500 <= report.tokens_verified <= 750
        assert report.tokens > 6000

    def test_none(self, trace, model):
        report = replay(trace, model, verify="none", max_requests=1)
        assert (report.tokens_verified, report.worst_error) == (0, None)
        assert report.attention is not None
        assert report.rows_checked > 0

    def test_without_attention_every_row_is_checked(self, trace, model):
        report = replay(trace, model, verify="sampled", attention="none")
        assert (report.attention, report.tokens_verified, report.worst_error) == (None, 0, None)
        assert report.rows_checked == 3 * report.tokens
        assert report.mismatches == 0


def test_packaged_slice_without_attention():
    """A part of the packaged Mooncake slice, long contexts and prefix hits included."""
    report = run_replay(ReplayOptions(trace="mooncake", max_requests=6, attention="none"))
    assert (report.requests, report.mismatches) == (6, 0)
    assert report.reused_tokens == 5 * 512  # all share the first block
    assert report.rows_checked == 3 * report.tokens


def test_progress(trace, model):
    calls: list[tuple[int, int, str]] = []
    run_replay(ReplayOptions(trace=trace, model=model, verify="none"), progress=lambda *call: calls.append(call))
    total = PROMPTS + OUTPUTS
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == total
    assert {call[1] for call in calls} == {total}
    assert "4 requests finished" in calls[-1][2]


def last_row(metadata: DeepseekSparseSWAMetadata) -> torch.Tensor:
    """Window row of the last token."""
    rows = metadata.decode_swa_indices if metadata.prefill_swa_indices is None else metadata.prefill_swa_indices
    return rows[-1, 0]


def wrong_slot(metadata: DeepseekSparseSWAMetadata) -> None:
    row = last_row(metadata)
    row[0] = row[0] + 1 if row[0] % 2 == 0 else row[0] - 1


def neighbour_page(metadata: DeepseekSparseSWAMetadata) -> None:
    rows, page = metadata.decode_swa_indices, metadata.block_size
    rows[:] = torch.where(rows >= page, rows - page, rows)


def short_window(metadata: DeepseekSparseSWAMetadata) -> None:
    """Full rows lose their oldest entry."""
    for rows, lens in window_rows(metadata):
        full = lens == metadata.window_size
        rows[full, 0, :-1] = rows[full, 0, 1:]
        rows[full, 0, -1] = -1
        lens[full] -= 1


def wrong_length(metadata: DeepseekSparseSWAMetadata) -> None:
    for _, lens in window_rows(metadata):
        lens[lens < metadata.window_size] += 1


def dropped_entry(metadata: DeepseekSparseSWAMetadata) -> None:
    last_row(metadata)[0] = -1


def entry_in_the_padding(metadata: DeepseekSparseSWAMetadata) -> None:
    for rows, lens in window_rows(metadata):
        rows[lens < metadata.window_size, 0, -1] = 0


def wrong_entry_slot(metadata: DeepseekSparseSWAMetadata) -> None:
    slots = metadata.compressed["c4a"].compressed_slot_mapping
    slots[slots > 0] -= 1


def wrong_request(metadata: DeepseekSparseSWAMetadata) -> None:
    metadata.token_to_req_indices[-1] = 0


def early_entry(metadata: DeepseekSparseSWAMetadata) -> None:
    metadata.compressed["c128a"].lens.add_(1)


def wrong_entry(metadata: DeepseekSparseSWAMetadata) -> None:
    group = metadata.compressed["c128a"]
    group.rows[group.lens > 1, 0] = group.rows[group.lens > 1, 1]


def invalid_token(metadata: DeepseekSparseSWAMetadata) -> None:
    metadata.is_valid_token[0] = False


def moved_border(metadata: DeepseekSparseSWAMetadata) -> None:
    metadata.num_decodes += 1


def window_rows(metadata: DeepseekSparseSWAMetadata) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = [(metadata.decode_swa_indices, metadata.decode_swa_lens)]
    if metadata.prefill_swa_indices is not None:
        rows.append((metadata.prefill_swa_indices, metadata.prefill_swa_lens))
    return rows


ROW_FAULTS = [
    wrong_slot, neighbour_page, short_window, wrong_length, dropped_entry, entry_in_the_padding, wrong_entry_slot,
    wrong_request, early_entry, wrong_entry, invalid_token, moved_border,
]  # fmt: skip


class LostTopk(ReferenceOperations):
    """The last pick of a row is not counted."""

    def map_topk(self, *arguments: Any) -> None:
        super().map_topk(*arguments)
        arguments[-1].sub_(1).clamp_(min=0)


class LostWrite(ReferenceOperations):
    """One token of a step is not stored."""

    def write_kv(self, k: torch.Tensor, pages: Any, slot_mapping: torch.Tensor) -> None:
        slots = slot_mapping.clone()
        slots[-1] = -1
        super().write_kv(k, pages, slots)


class CorruptPage(ReferenceOperations):
    """One byte of a value changes after it was written."""

    def write_kv(self, k: torch.Tensor, pages: Any, slot_mapping: torch.Tensor) -> None:
        super().write_kv(k, pages, slot_mapping)
        if pages.entries == 64 and len(slot_mapping) > 1:
            page, token = divmod(int(slot_mapping[0]), pages.entries)
            pages.data[page, token * pages.layout.data_stride + 9] ^= 0x78


class WrongScale(ReferenceOperations):
    """Every scale of the written tokens is twice too large."""

    def write_kv(self, k: torch.Tensor, pages: Any, slot_mapping: torch.Tensor) -> None:
        super().write_kv(k * 2, pages, slot_mapping)


OUTPUT_FAULTS = [LostWrite, CorruptPage, WrongScale]


def faulty_backend(
    operations: type[ReferenceOperations] = ReferenceOperations,
    spoil_build: Callable[[DeepseekSparseSWAMetadata], None] | None = None,
    spoil_output: Callable[[AttentionCall], None] | None = None,
) -> Backend:
    """The CPU platform with other operations, or with something that spoils what it builds or its outputs."""
    honest = get_backend("cpu").platform
    changes: dict[str, Any] = {"name": "faulty", "load_operations": operations}
    if spoil_build is not None:

        class SpoilingBuilder(honest.load_builder()):  # type: ignore[misc]
            def build(self, *arguments: Any, **options: Any) -> DeepseekSparseSWAMetadata:
                metadata = super().build(*arguments, **options)
                spoil_build(metadata)
                return metadata

        changes["load_builder"] = lambda: SpoilingBuilder
    if spoil_output is not None:
        (provider,) = honest.load_providers(None)

        class Spoilt(type(provider)):  # type: ignore[misc]
            def decode(self, call: AttentionCall) -> None:
                super().decode(call)
                spoil_output(call)

            def prefill(self, call: AttentionCall) -> None:
                super().prefill(call)
                spoil_output(call)

        changes["load_providers"] = lambda target: (Spoilt(),)
    return Backend(replace(honest, **changes))


@pytest.fixture
def plant(monkeypatch):
    """Makes `run_replay` use another backend."""

    def use(backend: Backend) -> None:
        monkeypatch.setattr("swa_backend.replay.runner.get_backend", lambda name=None: backend)

    return use


class TestPlantedFaults:
    """Golden rule: a run with a fault in it must fail."""

    @pytest.mark.parametrize("fault", ROW_FAULTS)
    def test_index_rows(self, trace, model, plant, fault):
        plant(faulty_backend(spoil_build=fault))
        report = replay(trace, model, attention="none", verify="none", max_batched_tokens=512)
        assert report.row_mismatches == report.mismatches > 0
        assert report.examples

    def test_topk(self, trace, model, plant):
        plant(faulty_backend(LostTopk))
        report = replay(trace, model, attention="none", verify="none")
        assert report.row_mismatches == report.mismatches > 0

    @pytest.mark.parametrize("data", ["exact", "arbitrary"])
    @pytest.mark.parametrize("fault", OUTPUT_FAULTS)
    def test_outputs(self, trace, model, plant, fault, data):
        plant(faulty_backend(fault))
        report = replay(trace, model, max_requests=1, data=data, max_batched_tokens=256)
        assert report.row_mismatches == 0
        assert report.output_mismatches == report.mismatches > 0
        assert any("position" in example for example in report.examples)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda call: call.out[-1].zero_(),
            lambda call: call.out.mul_(1.01),
            lambda call: call.out[0, 0].fill_(torch.nan),
            lambda call: call.out.copy_(call.out.roll(1, dims=1)),
        ],
        ids=["zero row", "one percent", "nan", "heads mixed up"],
    )
    def test_provider(self, trace, model, plant, spoil):
        plant(faulty_backend(spoil_output=spoil))
        report = replay(trace, model, max_requests=1)
        assert report.output_mismatches > 0
        json.dumps(report.to_dict(), allow_nan=False)

    def test_honest_platform_under_another_name_passes(self, trace, model, plant):
        plant(faulty_backend(ReferenceOperations))
        assert replay(trace, model, max_requests=1).mismatches == 0

    def test_a_mismatch_in_the_sample_too(self, trace, model, plant):
        plant(faulty_backend(LostWrite))
        assert replay(trace, model, max_requests=1, verify="sampled").mismatches > 0

    @pytest.mark.parametrize("fault", [{"spoil_build": wrong_slot}, {"operations": LostWrite}], ids=["rows", "cache"])
    def test_exit_status(self, trace, model, plant, capsys, fault):
        plant(faulty_backend(**fault))
        arguments = ["replay", "--trace", str(trace), "--model", str(model), "--max-requests", "1"]
        assert cli.main(arguments) == 1
        assert "wrong" in capsys.readouterr().out
        assert cli.main([*arguments, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["mismatches"] > 0


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"attention": "some"}, "attention"),
            ({"verify": "most"}, "verify"),
            ({"data": "real"}, "data"),
            ({"seed": -1}, "seed"),
            ({"drafts": -1}, "drafts"),
            ({"drafts": 1.5}, "drafts"),
            ({"acceptance": 1.5}, "acceptance"),
            ({"acceptance": float("nan")}, "acceptance"),
            ({"acceptance": "0.5"}, "acceptance"),
            ({"max_requests": 0}, "max_requests"),
            ({"max_batched_tokens": 0}, "max_batched_tokens"),
            ({"max_batched_tokens": 3, "drafts": 3}, "max_batched_tokens"),
            ({"max_seqs": True}, "max_seqs"),
            ({"max_model_len": 0}, "max_model_len"),
            ({"pages": 0}, "pages"),
            ({"page_tokens": 0}, "page_tokens"),
            ({"skip_bad_rows": 1}, "skip_bad_rows"),
            ({"layers": []}, "layers"),
            ({"layers": "c4a"}, "layers"),
            ({"attention": "none", "verify": "all"}, "verify"),
        ],
    )
    def test_refused_at_construction(self, options, field):
        with pytest.raises(ConfigError) as raised:
            ReplayOptions(**options)
        assert raised.value.field == field

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"model": "V5"}, "model"),
            ({"layers": ["c1a"]}, "layers"),
            ({"page_tokens": 48}, "page_tokens"),
            ({"cache_layout": "fp4_ds_mla_v41"}, "cache_layout"),
            ({"compressed_layout": "fp4"}, "compressed_layout"),
            ({"max_model_len": 10_000}, "max_model_len"),
            ({"pages": 2}, "pages of the cache group 'window'"),
            ({"pages": 10**12}, "pages"),
        ],
    )
    def test_refused_by_model_or_trace(self, trace, model, options, field):
        with pytest.raises(ConfigError) as raised:
            replay(trace, **{"model": model, **options})
        assert raised.value.field == field

    def test_platform_and_trace(self, trace, model):
        with pytest.raises(PlatformError):
            replay(trace, model, platform="nope")
        with pytest.raises(TraceError) as raised:
            replay(trace, model, max_model_len=611)
        assert raised.value.field == f"{trace}:1: request length"
        assert raised.value.legal == "at most max_model_len = 611"

    def test_model_limit_counts_where_no_other_is_given(self, tmp_path, model):
        path = tmp_path / "t.csv"
        path.write_text(HEADER + "2024-01-01 00:00:00,8000,193\n")
        with pytest.raises(TraceError, match="max_model_len = 8192"):
            replay(path, model)

    def test_defaults(self):
        assert ReplayOptions().request_limit == 12
        assert ReplayOptions(max_requests=3).request_limit == 3
        assert ReplayOptions(trace="azure").request_limit is None

    def test_without_the_command_lines_packages(self, trace, model):
        code = f"""
import sys
sys.modules["typer"] = sys.modules["rich"] = None
from swa_backend.replay import ReplayOptions, run_replay
options = ReplayOptions(trace={str(trace)!r}, model={str(model)!r}, max_requests=1, attention="none")
print(run_replay(options).mismatches)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--trace", "no/such/file.csv"], "no/such/file.csv: found No such file or directory"),
            (["--model", "V5"], "model: found 'V5'; legal: V4-Flash, V4-Pro"),
            (["--layers", "swaonly,c2a"], "layers: found 'c2a'; legal: swaonly, c4a, c128a"),
            (["--page-tokens", "48"], "page_tokens: found 48; legal: 32, 64"),
            (["--pages", "1"], "pages of the cache group 'window'"),
            (["--pages", "1000000000000"], "pages"),
            (["--max-model-len", "100"], ":2: request length: found 4099 prompt + 69 generated = 4168 tokens"),
            (["--acceptance", "2"], "acceptance: found 2.0"),
            (["--cache-layout", "fp4"], "cache_layout: found 'fp4'"),
            (["--attention", "none", "--verify", "all"], "verify"),
            (["--drafts", "-1"], "--drafts"),
            (["--attention", "some"], "--attention"),
            (["--max-requests", "0"], "--max-requests"),
        ],
    )
    def test_bad_input(self, arguments, said, capsys):
        assert cli.main(["replay", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert "Traceback" not in err

    def test_bad_rows(self, tmp_path, model, capsys):
        path = tmp_path / "t.csv"
        path.write_text(HEADER + "2024-01-01 00:00:00,20,2\nrubbish\n2024-01-01 00:00:00,30,2\n")
        arguments = ["replay", "--trace", str(path), "--model", str(model), "--json"]
        assert cli.main(arguments) == 2
        assert f"{path}:3: found 1 columns" in capsys.readouterr().err
        assert cli.main([*arguments, "--skip-bad-rows"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["requests"], report["skipped_rows"]) == (2, 1)

    def test_json_on_standard_output_and_progress_on_standard_error(self, trace, model):
        start = [sys.executable, "-m", "swa_backend", "replay", "--trace", str(trace), "--model", str(model)]
        done = subprocess.run([*start, "--drafts", "2", "--json"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["requests"], report["mismatches"]) == (4, 0)
        assert set(report["build"]) == set(report["attention"]) == {"p50", "p90", "p99", "max"}
        assert "4 requests finished" in done.stderr

    def test_table(self, trace, model, capsys):
        assert cli.main(["replay", "--trace", str(trace), "--model", str(model), "--layers", "swaonly, c4a"]) == 0
        out = capsys.readouterr().out
        for word in (
            "requests", "steps", "tokens", "build a step", "attention a step", "p50", "p90", "p99", "max",
            "pages in use (peak)", "prefix reuse", "tokens verified", "worst error", "mismatches",
        ):  # fmt: skip
            assert word in out
