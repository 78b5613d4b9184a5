"""Inspecting a step: what a file means, what the report says of hand-computed steps, what the picture shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swa_backend.batch import CommonAttentionMetadata
from swa_backend.cli import main
from swa_backend.config import SpeculativeConfig
from swa_backend.errors import BatchError, SwaBackendError
from swa_backend.inspect import inspect_step, read_batch, save_batch
from swa_backend.inspect import report as report_module
from swa_backend.inspect.batch_file import example_names
from swa_backend.inspect.report import StepReport
from swa_backend.inspect.trace_step import step_of_trace
from swa_backend.layer_types import LayerType
from swa_backend.registry import get_backend
from swa_backend.replay import ReplayOptions, run_replay, runner
from tests.support import Batch, make_config

CONFIGS = Path(__file__).parent / "golden" / "configs"


def inspected(batch: Mapping[str, Any], config: Mapping[str, Any] | None = None, **more: Any) -> StepReport:
    return inspect_step(read_batch({"batch": batch, "config": config or {}, **more}), get_backend("cpu"))


class TestFile:
    def test_what_is_left_out_follows(self) -> None:
        step = read_batch({"batch": {"query_start_loc": [0, 1, 4], "seq_lens": [130, 66]}})
        batch = step.batch
        assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len) == (2, 4, 3, 130)
        assert batch.block_table_tensor.tolist() == [[0, 1, 2], [3, 4, -1]]
        assert batch.slot_mapping.tolist() == [2 * 64 + 1, 3 * 64 + 63, 4 * 64, 4 * 64 + 1]
        assert step.num_pages == 5
        assert list(step.compressed) == [LayerType.C4A, LayerType.C128A]
        c4a = step.compressed[LayerType.C4A]
        assert (c4a.page_tokens, c4a.num_pages, c4a.table.tolist()) == (256, 2, [[0], [1]])
        assert c4a.slots.tolist() == [129, 256 + 63, 256 + 64, 256 + 65]
        assert (step.config.model.name, step.config.scheduler.max_model_len) == ("V4-Flash", 8192)

    def test_padding_and_pages_that_are_missing_have_no_slot(self) -> None:
        given = {"query_start_loc": [0, 2], "seq_lens": [65], "block_table_tensor": [[7, -1]], "num_actual_tokens": 4}
        step = read_batch({"batch": given})
        assert step.batch.slot_mapping.tolist() == [7 * 64 + 63, -1, -1, -1]
        assert step.num_pages is None  # a table that is given says nothing of the cache's size

    def test_a_table_that_is_too_narrow_gives_no_slot(self) -> None:
        step = read_batch({"batch": {"query_start_loc": [0, 1], "seq_lens": [65], "block_table_tensor": [[7]]}})
        assert step.batch.slot_mapping.tolist() == [-1]

    @pytest.mark.parametrize("name", example_names())
    def test_examples_are_fine(self, name: str) -> None:
        report = inspect_step(read_batch(name), get_backend("cpu"))
        assert report.problems == ()
        assert (report.validation is None) is (name != "missing-page")

    def test_a_model_may_be_a_file_or_what_one_holds(self, tmp_path: Path) -> None:
        held = json.loads((CONFIGS / "deepseek-v4-pro.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(held))
        for model in (held, str(tmp_path)):
            step = read_batch({"config": {"model": model}, "batch": {"query_start_loc": [0], "seq_lens": []}})
            assert step.config.model.num_heads == 128

    @pytest.mark.parametrize(
        ("change", "field", "found"),
        [
            ({"batch": None}, "batch", "nothing"),
            ({"batch": 7}, "batch", "int"),
            ({"bach": {}}, "batch file.bach", "a key that means nothing here"),
            ({"batch": {"seq_lens": [1]}}, "batch.query_start_loc", "nothing"),
            ({"batch": {"query_start_loc": [0, 1]}}, "batch.seq_lens", "nothing"),
            ({"batch": {"query_start_loc": [1, 2], "seq_lens": [5]}}, "batch.query_start_loc", "[1, 2]"),
            ({"batch": {"query_start_loc": [0, 2, 1], "seq_lens": [5, 5]}}, "batch.query_start_loc", "[0, 2, 1]"),
            ({"batch": {"query_start_loc": [0, 3], "seq_lens": [2]}}, "batch.seq_lens[0]", "2"),
            ({"batch": {"query_start_loc": [0, 1], "seq_lens": [5, 5]}}, "batch.seq_lens", "2 numbers"),
            ({"batch": {"query_start_loc": [0, 1], "seq_lens": ["5"]}}, "batch.seq_lens[0]", "'5'"),
            ({"batch": {"query_start_loc": [0, 1], "seq_lens": [True]}}, "batch.seq_lens[0]", "True"),
            ({"batch": {"query_start_loc": [0, 1], "seq_lens": [2**31]}}, "batch.seq_lens[0]", "2147483648"),
            ({"slot_mapping": [1, 2], "num_actual_tokens": 1}, "batch.slot_mapping", "2 numbers"),
            ({"num_actual_tokens": 0}, "batch.num_actual_tokens", "0"),
            ({"block_table_tensor": [[1], [2]]}, "batch.block_table_tensor", "2 rows"),
            ({"block_table_tensor": {"0": 1}}, "batch.block_table_tensor", "dict"),
            ({"block_table_tensor": [[1.5]]}, "batch.block_table_tensor[0][0]", "1.5"),
            ({"causal": 1}, "batch.causal", "1"),
            ({"mm_req_doc_ranges": [[1, 2]]}, "batch.mm_req_doc_ranges", "[[1, 2]]"),
            ({"mm_req_doc_ranges": {"x": [[1, 2]]}}, "batch.mm_req_doc_ranges['x']", "[[1, 2]]"),
            ({"mm_req_doc_ranges": {"0": [[1, 2, 3]]}}, "batch.mm_req_doc_ranges['0']", "[[1, 2, 3]]"),
            ({"config": {"pages": 3}}, "config.pages", "a key that means nothing here"),
            ({"config": {"speculative": {}}}, "config.speculative.num_speculative_tokens", "nothing"),
            ({"config": {"speculative": 3}}, "config.speculative", "int"),
            ({"config": {"page_tokens": 48}}, "page_tokens", "48"),
            ({"config": {"max_num_seqs": "8"}}, "max_num_seqs", "'8'"),
            ({"config": {"model": "V5"}}, "model config", "V5"),
            ({"groups": {"c2a": {}}}, "groups.c2a", "a key that means nothing here"),
            ({"groups": {"c4a": {"page_tokens": 6}}}, "groups.c4a.page_tokens", "6"),
            ({"groups": {"c128a": {"topk": [[0]]}}}, "groups.c128a.topk", "picks"),
            ({"groups": {"c4a": {"topk": [[0], [1]]}}}, "groups.c4a.topk", "2 rows"),
            ({"num_pages": 0}, "num_pages", "0"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path: Path, change: dict[str, Any], field: str, found: str) -> None:
        whole = {"batch": {"query_start_loc": [0, 1], "seq_lens": [5]}}
        top = {key for key in change if key in ("batch", "bach", "config", "groups", "num_pages")}
        data = {**whole, **change} if top else {"batch": {**whole["batch"], **change}}
        path = tmp_path / "step.json"
        path.write_text(json.dumps(data))
        with pytest.raises(SwaBackendError) as error:
            read_batch(path)
        assert error.value.field == f"{path}: {field}"
        assert found in str(error.value.found)

    def test_rows_of_one_length(self) -> None:
        given = {"query_start_loc": [0, 1, 2], "seq_lens": [5, 5], "block_table_tensor": [[1, 2], [3]]}
        with pytest.raises(BatchError, match=r"block_table_tensor\[1\]: found 1 numbers; legal: 2, as in row 0"):
            read_batch({"batch": given})

    def test_saved_by_an_engine_and_read_back(self, tmp_path: Path) -> None:
        config = make_config(k=2, max_image_tokens=384, page_tokens=32)
        batch = Batch([3, 40], [70, 40], page_tokens=32, spans={1: [(3, 9)]}, replay=[0, 0], padding=2).metadata()
        table, slots = torch.tensor([[4], [9]], dtype=torch.int32), torch.arange(45) - 2
        groups = {"c4a": (table, slots), "another": (table, slots)}
        save_batch(tmp_path / "step.json", batch, config, 12, groups, page_tokens=128)
        step = read_batch(tmp_path / "step.json")
        assert step.config.model == config.model
        assert step.config.scheduler == config.scheduler
        assert step.config.speculative == SpeculativeConfig(2)
        assert (step.config.page_tokens, step.num_pages) == (32, 12)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "replay_start"):
            assert torch.equal(getattr(step.batch, name), getattr(batch, name))
        assert step.batch.mm_req_doc_ranges == {1: [(3, 9)]}
        assert torch.equal(step.compressed[LayerType.C4A].table, table)
        assert torch.equal(step.compressed[LayerType.C4A].slots, slots)
        assert step.compressed[LayerType.C4A].page_tokens == 128

    def test_a_packaged_model_is_saved_by_its_name(self, tmp_path: Path) -> None:
        step = read_batch("mixed")
        save_batch(tmp_path / "step.json", step.batch, step.config)
        assert json.loads((tmp_path / "step.json").read_text())["config"]["model"] == "V4-Flash"


class TestReport:
    """Values of field cases, by hand."""

    def test_r1_r2_r3_rows(self) -> None:
        report = inspect_step(read_batch("decode"), get_backend("cpu"))
        rows = [(one.len, one.first_key, one.last_key, one.first_slot, one.last_slot) for one in report.tokens]
        assert rows[:3] == [(128, 0, 127, 448, 255), (128, 1, 128, 449, 576), (128, 2, 129, 450, 577)]
        assert rows[3] == (5, 0, 4, 320, 324)
        assert rows[4] == (0, None, None, None, None)
        assert [one.part for one in report.tokens] == ["decode"] * 4 + ["padding"]
        assert report.tokens[3].keys == {"window": 5}
        assert [one.entries for one in report.tokens[1:]] == [
            {"c4a": 32, "c128a": 1}, {"c4a": 32, "c128a": 1}, {"c4a": 1, "c128a": 0}, {"c4a": 0, "c128a": 0}
        ]  # fmt: skip
        split = report.facts["split"]
        assert (split["decodes"], split["decode_tokens"], split["prefills"], split["padding"]) == (2, 5, 0, 1)
        pages = {(one.group, one.request): (one.first_column, one.pages) for one in report.pages}
        assert pages["window", 0] == (0, (7, 3, 9))
        assert pages["window", 1] == (0, (5,))
        assert report.chunks == ()

    def test_r5_r6_draft_blocks(self) -> None:
        report = inspect_step(read_batch("draft"), get_backend("cpu"))
        assert [(one.first_key, one.last_key, one.keys) for one in report.tokens] == [
            *[(72, 204, {"window": 128, "draft": 5})] * 5, *[(0, 44, {"window": 40, "draft": 5})] * 5
        ]  # fmt: skip
        assert (report.facts["decode_width"], report.facts["causal"]) == (192, False)

    def test_r7_image(self) -> None:
        report = inspect_step(read_batch("image"), get_backend("cpu"))
        seen = {one.position: (one.first_key, one.last_key, one.keys) for one in report.tokens if one.request == 1}
        assert seen[100] == (0, 400, {"window": 101, "image": 300})
        assert seen[250] == (100, 400, {"window": 128, "image": 173})
        assert seen[400] == (100, 400, {"window": 128, "image": 173})
        assert seen[401] == (274, 401, {"window": 128})
        assert report.requests[1].images == ((100, 400),)

    def test_r9_a_missing_page(self) -> None:
        report = inspect_step(read_batch("missing-page"), get_backend("cpu"))
        assert report.tokens[0].keys == {"window": 64, "missing": 64}
        assert [(one.group, one.request, one.without_page) for one in report.pages if one.without_page] == [
            ("window", 0, (1,)), ("window", 1, (2,))
        ]  # fmt: skip
        assert report.validation is not None
        assert "column 1" in report.validation
        assert report.problems == ()

    def test_r8_replay(self) -> None:
        report = inspected({"query_start_loc": [0, 138], "seq_lens": [650], "replay_start": [384]})
        assert min(one.first_key for one in report.tokens if one.first_key is not None) == 512 - 127
        given = {"query_start_loc": [0, 138], "seq_lens": [522], "replay_start": [384]}
        report = inspected(given)
        seen = {one.position: (one.first_key, one.len) for one in report.tokens}
        assert (seen[384], seen[511]) == ((384, 1), (384, 128))
        assert report.requests[0].gathered == 138

    def test_picks_of_the_indexer(self) -> None:
        given = {"query_start_loc": [0, 1, 2], "seq_lens": [4096, 20]}
        unknown = inspected(given)
        assert [one.entries["c4a"] for one in unknown.tokens] == [512, 5]
        assert unknown.entries[LayerType.C4A].known.tolist() == [False, True]
        picks = [[7, 3, 1023, 1024, -1], [4, 5, -1, -1, -1]]  # 1024 and 5 are not complete yet
        known = inspected(given, groups={"c4a": {"topk": picks}})
        assert [one.entries["c4a"] for one in known.tokens] == [3, 1]
        assert [one.tolist() for one in known.entries[LayerType.C4A].entries] == [[3, 7, 1023], [4]]
        assert known.entries[LayerType.C4A].known.all()

    def test_chunk_plan_in_requests_of_the_batch(self) -> None:
        report = inspected(
            {"query_start_loc": [0, 1, 101, 301], "seq_lens": [9, 1000, 200]},
            {"max_model_len": 1024, "max_num_batched_tokens": 301, "prefill_chunk_size": 1},
        )
        plan = {(one.layer_type, one.requests): one for one in report.chunks}
        # Budgets: 128 + 301, and 256 or 8 entries more. Gathered: 100 + 127 and 200. Entries: 250 and 50, 7 and 1.
        assert set(plan) == {(kind, (request, request)) for kind in ("swaonly", "c4a", "c128a") for request in (1, 2)}
        one = plan["c4a", (1, 1)]
        assert (one.tokens, one.compressed, one.width, one.rows, one.budget) == (100, 250, 477, 477, 685)
        assert one.bytes == 477 * 512 * 2

    def test_a_row_that_is_wrong_is_found(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = report_module._build

        def wrong(*arguments: Any) -> Any:
            builder, metadata = real(*arguments)
            metadata.decode_swa_indices[1, 0, 5] += 1
            return builder, metadata

        monkeypatch.setattr(report_module, "_build", wrong)
        report = inspect_step(read_batch("decode"), get_backend("cpu"))
        assert report.problems == ("token 1: its row is not that of positions 1 to 128",)
        assert main(["inspect", "--platform", "cpu", "--batch", "decode"]) == 1
        assert "WRONG: token 1" in capsys.readouterr().out

    def test_an_empty_step(self) -> None:
        report = inspected({"query_start_loc": [0], "seq_lens": []})
        assert (report.tokens, report.requests, report.pages) == ((), (), ())


@pytest.mark.parametrize(("number", "drafts"), [(1, 0), (7, 2)])
def test_a_step_of_a_trace_is_the_replays(monkeypatch: pytest.MonkeyPatch, number: int, drafts: int) -> None:
    built: list[CommonAttentionMetadata] = []
    picked = []
    real, choose = runner.make_step, runner.Layers.choose

    def make_step(*arguments: Any) -> Any:
        step = real(*arguments)
        built.append(step.batch)
        return step

    def note(layers: Any, step: Any) -> Any:
        picked.append(choose(layers, step))
        return picked[-1]

    monkeypatch.setattr(runner, "make_step", make_step)
    monkeypatch.setattr(runner.Layers, "choose", note)
    options = ReplayOptions(
        max_requests=3, attention="none", platform="cpu", drafts=drafts, max_batched_tokens=256, acceptance=0.3
    )
    run_replay(options)
    step = step_of_trace(options, number)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        assert torch.equal(getattr(step.batch, name), getattr(built[number - 1], name))
    picks = step.compressed[LayerType.C4A].picks
    assert picks is not None
    assert torch.equal(picks, picked[number - 1][LayerType.C4A])
    assert inspect_step(step, get_backend("cpu")).problems == ()
    with pytest.raises(SwaBackendError, match=f"step: found 1000000; legal: 1 to {len(built)}"):
        step_of_trace(options, 1_000_000)


class TestPicture:
    """The colours of a picture, read back from the file."""

    @pytest.fixture
    def colours(self, tmp_path: Path) -> Any:
        pytest.importorskip("matplotlib")
        from matplotlib import image

        def colours(*arguments: str) -> dict[str, int]:
            path = tmp_path / "step.png"
            status = 1 if "missing-page" in arguments else 0  # which validation would refuse
            assert main(["inspect", "--platform", "cpu", "--plot", str(path), *arguments]) == status
            red, green, blue = (image.imread(path)[..., :3] * 255).round().astype(int).transpose(2, 0, 1)
            found, counts = np.unique((red << 16) + (green << 8) + blue, return_counts=True)
            return {f"#{one:06X}": int(n) for one, n in zip(found, counts, strict=True)}

        return colours

    def test_each_kind_has_its_colour(self, colours: Any, capsys: pytest.CaptureFixture[str]) -> None:
        large = 5000  # pixels; a legend's patch has fewer than 1000
        for name, expected in {
            "mixed": {"#0072B2", "#CC79A7"},
            "image": {"#0072B2", "#CC79A7", "#E69F00"},
            "draft": {"#0072B2", "#CC79A7", "#009E73"},
            "missing-page": {"#0072B2", "#CC79A7", "#000000"},
        }.items():
            kinds = {"#0072B2", "#CC79A7", "#E69F00", "#009E73", "#000000"}
            counts = colours("--batch", name)
            areas = {colour: counts.get(colour, 0) for colour in kinds}
            areas["#000000"] -= 0 if name == "missing-page" else areas["#000000"]  # text and borders
            assert {colour for colour, n in areas.items() if n > large} == expected, name

    def test_window_layers_alone(self, colours: Any) -> None:
        assert colours("--batch", "decode", "--layer", "swaonly").get("#CC79A7", 0) == 0

    def test_an_empty_step_cannot_be_drawn(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        (tmp_path / "empty.json").write_text('{"batch": {"query_start_loc": [0], "seq_lens": []}}')
        arguments = ["inspect", "--batch", str(tmp_path / "empty.json")]
        assert main(arguments) == 0
        assert main([*arguments, "--plot", str(tmp_path / "a.png")]) == 2
        assert "plot: found a step without tokens" in capsys.readouterr().err

    def test_a_request_without_slots_shifts_nothing(self, colours: Any, tmp_path: Path) -> None:
        given = {"query_start_loc": [0, 1, 2], "seq_lens": [20, 6000], "slot_mapping": [19, -1]}
        (tmp_path / "padded.json").write_text(json.dumps({"batch": given}))
        alone = {"query_start_loc": [0, 1], "seq_lens": [20], "num_actual_tokens": 2}
        (tmp_path / "alone.json").write_text(json.dumps({"batch": alone}))
        blue = [
            colours("--batch", str(tmp_path / name), "--layer", "swaonly")["#0072B2"]
            for name in ("padded.json", "alone.json")
        ]
        assert blue[0] == pytest.approx(blue[1], rel=0.1)

    def test_more_tokens_and_keys_than_pixels(self) -> None:
        pytest.importorskip("matplotlib")
        from swa_backend.inspect.picture import _Cells
        from swa_backend.inspect.seen import Key

        cells = _Cells.of(3000, 2800)  # three tokens and two keys a cell
        assert (cells.lines, cells.columns) == (1000, 1400)
        cells.add(4, np.array([0, 1, 2]), np.array([Key.WINDOW] * 3))
        cells.add(5, np.array([2797]), np.array([Key.MISSING]))
        picture = (cells.colours(np.ones((1000, 3)))[1] * 255).round().astype(int)
        window, white = np.array([0, 0x72, 0xB2]), np.array([255] * 3)
        for column, share in ((0, 2 / 6), (1, 1 / 6)):
            strength = 0.25 + 0.75 * share
            assert np.abs(picture[column] - (white * (1 - strength) + window * strength)).max() <= 1
        assert picture[2].tolist() == [255] * 3
        assert picture[1398].tolist() == [0] * 3  # one missing key is as black as all of them


class TestCommand:
    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", "--platform", "cpu", "--batch", "decode", "--json"]) == 0
        out, err = capsys.readouterr()
        report = json.loads(out)
        assert err == ""
        assert report["tokens"][3]["slots"] == [320, 321, 322, 323, 324]
        assert report["split"]["decode_threshold"] == 3
        assert report["layers"][1] == {
            "layer_type": "c4a", "layers": 21, "ratio": 4, "sees": "the window and 1 to 32 entries",
            "plan": "none: reference takes no plan",
        }  # fmt: skip

    def test_tables(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "100")
        assert main(["inspect", "--platform", "cpu"]) == 0
        text = capsys.readouterr().out
        assert "3 decodes of 3 tokens, 1 prefills of 497 tokens" in text
        assert "624 of 8,704" in text
        assert text.count("prefill \u2502 128") == 4  # two tokens at each end of the request
        assert main(["inspect", "--platform", "cpu", "--rows", "0"]) == 0
        assert capsys.readouterr().out.count("prefill \u2502 128") == 497

    def test_narrow_terminal(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["inspect", "--platform", "cpu", "--batch", "image"]) == 0
        assert "\u2026" not in capsys.readouterr().out
        assert main(["inspect", "--help"]) == 0
        text = " ".join(re.sub(r"[^a-z-]", " ", capsys.readouterr().out).split())
        assert ", ".join(example_names()).replace(",", "") in text

    def test_a_step_of_a_trace(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["inspect", "--platform", "cpu", "--trace", "azure", "--max-requests", "2", "--step", "2", "--json"]
        assert main(arguments) == 0
        assert json.loads(capsys.readouterr().out)["source"] == "step 2 of azure2023_conv_mid1000.csv"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                ["--batch", "no/such/file"],
                "no/such/file: found No such file or directory; legal: a readable JSON file, or",
            ),
            (["--batch", "{folder}"], "found Is a directory"),
            (["--batch", "{broken}"], "found no JSON ("),
            (["--batch", "decode", "--trace", "azure"], "batch: found --batch and --trace together"),
            (["--trace", "no/such/file"], "No such file"),
            (["--batch", "decode", "--layer", "c2a", "--plot", "{folder}/a.png"], "layer: found 'c2a'; legal: swaonly"),
            (["--batch", "decode", "--plot", "{folder}/a.gif"], "a file name that ends in .png"),
            (["--trace", "azure", "--step", "100000", "--max-requests", "1"], "step: found 100000; legal: 1 to"),
        ],
    )
    def test_refusals(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
    ) -> None:
        pytest.importorskip("matplotlib")
        broken = tmp_path / "broken.json"
        broken.write_text('{"batch": {"query_start_loc": [0, 1')
        given = [one.format(folder=tmp_path, broken=broken) for one in arguments]
        assert main(["inspect", "--platform", "cpu", *given]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err

    def test_missing_extra_is_named(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert main(["inspect", "--platform", "cpu", "--plot", "a.png"]) == 2
        assert "Run: pip install 'swa-backend[plot]'" in capsys.readouterr().err
        assert main(["inspect", "--platform", "cpu", "--batch", "decode"]) == 0


@pytest.mark.parametrize(("name", "status"), [("missing-page", 1), ("mixed", 0)])
def test_what_validation_would_refuse_shows_in_the_exit_status(
    name: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--platform", "cpu", "--batch", name, "--json"]) == status
    assert (json.loads(capsys.readouterr().out)["validation"] is None) is (status == 0)
