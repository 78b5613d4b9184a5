"""Fuzzing: histories pass, faults that are planted are found and shrunk, saved cases run again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swa_backend import cli
from swa_backend.builder import DeepseekSparseSWAMetadataBuilder
from swa_backend.errors import TraceError
from swa_backend.fuzz import Case, CaseFailedError, campaign, load_case, random_case, run_case, run_fuzz, shrink
from swa_backend.fuzz.case import Knobs, RequestSpec
from swa_backend.fuzz.engine import Counts, Engine
from swa_backend.fuzz.rows import right_metadata
from swa_backend.reference import provider as reference_provider
from swa_backend.reference import rows as reference_rows
from swa_backend.registry import get_backend
from tests.oracle_rows import rows_of

CPU = torch.device("cpu")
STEPS = 700
SAVED = sorted((Path(__file__).parent / "fuzz_cases").glob("*.json"))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Steps are small; threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_histories_pass() -> None:
    report = run_fuzz(get_backend("cpu"), CPU, seed=0, steps=STEPS)
    assert not report.failures, report.failures[0].text
    assert report.steps >= STEPS
    assert report.outputs > STEPS
    assert report.captured_steps > STEPS // 20


def test_metadata_of_histories_passes() -> None:
    """Without attention a step costs less; other seeds."""
    report = run_fuzz(get_backend("cpu"), CPU, seed=10_000, steps=STEPS, attention=False)
    assert not report.failures, report.failures[0].text
    assert report.outputs == 0


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "fuzz_cases").glob("*.json")), ids=lambda path: path.stem
)
def test_a_case_that_failed_once_passes(path: Path) -> None:
    run_case(load_case(path), get_backend("cpu"), CPU)


def steps_of(seeds: range) -> Any:
    """(case, engine, step) of each step of some histories, by the engine alone."""
    for seed in seeds:
        case = random_case(seed)
        engine = Engine(case)
        while (step := engine.step()) is not None:
            yield case, engine, step
            engine.finish(step)


def test_everything_that_an_engine_does_occurs() -> None:
    seen = dict.fromkeys((*Counts.__slots__, "foreign", "hole", "cut table", "padding", "padded request"), 0)
    seen |= dict.fromkeys(("captured", "chunked prefill", "zero-token request", "mixed", "empty", "two groups"), 0)
    engines = set()
    for case, engine, step in steps_of(range(60)):
        engines.add(engine)
        real = step.slots["main"][: len(step.row)]
        pages = case.knobs.pages
        seen["foreign"] += bool((real < 0).any())
        live = [step.tables["main"][row, position // case.knobs.page_tokens :][:1]
                for row, position in zip(step.row, step.position, strict=True)]  # fmt: skip
        seen["cut table"] += any(not len(page) for page in live)
        seen["hole"] += any(len(page) and not 0 <= page[0] < pages for page in live)
        seen["padding"] += step.num_tokens > len(step.row) > 0
        seen["padded request"] += any(part.request is None for part in step.parts)
        seen["captured"] += step.captured
        seen["zero-token request"] += any(part.request is not None and not part.count for part in step.parts)
        seen["chunked prefill"] += any(
            part.request is not None and part.end < part.request.spec.prompt for part in step.parts
        )
        longest = [part.count for part in step.parts]
        seen["mixed"] += bool(longest) and min(longest) == 1 and max(longest) > case.knobs.threshold
        seen["empty"] += not step.num_tokens
        seen["two groups"] += len(step.slots) == 2
    for engine in engines:
        for name in Counts.__slots__:
            seen[name] += getattr(engine.counts, name)
    assert all(seen.values()), seen


def test_the_engine_keeps_its_own_books() -> None:
    for number, (_, engine, _) in enumerate(steps_of(range(60, 90))):
        if number % 5 == 0:
            assert engine.tables.check() == []


def test_the_oracle_agrees_with_another_one() -> None:
    """What each token sees, as the tests' own row oracle has it, which shares no line with this one."""
    compared = 0
    for case, _, step in steps_of(range(200, 214)):
        knobs = case.knobs
        right = right_metadata(step, knobs)
        slots = step.slots["main"].tolist()
        tables = step.tables["main"].tolist()
        found = rows_of(
            step.queries.tolist(), step.seqs.tolist(), tables, slots, num_decode_tokens=right.decode_tokens,
            window=knobs.window, page_tokens=knobs.page_tokens, num_pages=knobs.pages, causal=step.causal,
            replay=None if step.replay is None else step.replay.tolist(), spans=step.spans,
            max_image_tokens=knobs.image_tokens,
        )  # fmt: skip
        for token, sees in enumerate(right.sees):
            if right.valid["main"][token]:
                assert len(found[token].row) == len(sees)
                compared += 1
            if right.left is not None and right.right is not None:
                assert (found[token].left, found[token].right) == (right.left[token], right.right[token])
    assert compared > 5000


def without_tail(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(buffers: Any, step: Any) -> None:
        kept = buffers.decode_lens.clone()
        original(buffers, step)
        if step.num_decode_tokens:
            buffers.decode_lens[:, step.num_decode_tokens :] = kept[:, step.num_decode_tokens :]

    return build


def with_step(original: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    return lambda buffers, step: original(buffers, replace(step, **changes))


def seen_once_more(original: Callable[..., Any]) -> Callable[..., Any]:
    def visibility(*args: Any) -> Any:
        left, right = original(*args)
        return left, torch.where(right > 0, right - 1, right)

    return visibility


def packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """A row of which the holes are gone."""

    def write(table: Any, pages: Any, tokens: Any, length: Any, part: Any, rows: Any, lens: Any) -> None:
        original(table, pages, tokens, length, part, rows, lens)
        order = (rows < 0).to(torch.int8).argsort(dim=1, stable=True)
        rows.copy_(rows.gather(1, order))

    return write


def no_sink(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, segments, sink, *rest: original(q, segments, torch.full_like(sink, -torch.inf), *rest)


def one_entry_less(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(q: Any, segments: Any, *rest: Any) -> None:
        original(q, [replace(one, lens=(one.lens - (one.lens > 100).int())) for one in segments], *rest)

    return attend


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "the tail of decode lens stays": (reference_rows, "build", without_tail),
    "replay is forgotten": (reference_rows, "build", lambda f: with_step(f, replay_start=None)),
    "draft blocks are causal": (reference_rows, "build", lambda f: with_step(f, causal=True)),
    "images are forgotten": (reference_rows, "build", lambda f: with_step(f, spans=None)),
    "an image ends a token early": (reference_rows, "_visibility", seen_once_more),
    "rows are packed again": (reference_rows, "_write_rows", packed),
    "an update does nothing": (
        DeepseekSparseSWAMetadataBuilder, "update_draft_decode_metadata", lambda f: lambda self, metadata: None,
    ),
    "sinks are forgotten": (reference_provider, "sparse_attention", no_sink),
    "a long row loses its last entry": (reference_provider, "sparse_attention", one_entry_less),
}  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, fault = PLANTED[name]
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))


def first_failure(seeds: range, attention: bool) -> tuple[Case, CaseFailedError]:
    for seed in seeds:
        case = random_case(seed, steps=60)
        try:
            run_case(case, get_backend("cpu"), CPU, attention=attention)
        except CaseFailedError as failure:
            return case, failure
    raise AssertionError("the fault was not found")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, name)
    attention = PLANTED[name][0] is reference_provider
    first_failure(range(40), attention)


def test_a_planted_fault_is_shrunk_saved_and_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as planted:
        plant(planted, "draft blocks are causal")
        case, _ = first_failure(range(40), attention=False)
        planted.setattr(campaign, "MAX_FAILURES", 1)
        report = run_fuzz(get_backend("cpu"), CPU, seed=case.seed, steps=10**6, attention=False, save=tmp_path)
        (failure,) = report.failures
        assert failure.path is not None
        small = load_case(Path(failure.path))
        assert small == failure.case
        assert len(small.requests) == 1
        assert small.knobs.dspark
        assert (small.knobs.holes, small.knobs.foreign, small.knobs.ratios) == (0, 0, ())
        assert [path.name for path in tmp_path.iterdir()] == [f"case-{case.seed}.json"]
        assert cli.main(["fuzz", failure.path, "--platform", "cpu", "--no-attention"]) == 1
        assert f"step {small.steps - 1}: main decode_swa_" in capsys.readouterr().out
    assert cli.main(["fuzz", failure.path, "--platform", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failure"] is None


def test_an_error_of_the_library_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: Any, *args: Any, **options: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(DeepseekSparseSWAMetadataBuilder, "build", build)
    with pytest.raises(CaseFailedError, match="ZeroDivisionError: a bug"):
        run_case(random_case(1), get_backend("cpu"), CPU)


def test_shrinking_keeps_what_the_failure_needs() -> None:
    """A made-up fault that needs request 5 with at least 17 prompt tokens, in step 9."""

    def run(case: Case) -> None:
        if case.steps > 9 and any(one.number == 5 and one.prompt >= 17 for one in case.requests):
            raise CaseFailedError(9, "made up")

    requests = tuple(RequestSpec(i, i, 90 + i, 40, 0, 30, ((3, 9),)) for i in range(12))
    case = Case(3, Knobs(ratios=(4, 128), drafts=5, dspark=True, holes=100, second_page_tokens=32), requests, 50)
    small, failure = shrink(case, run, seconds=20)
    assert failure is not None
    assert small.steps == 10
    (left,) = small.requests
    assert (left.number, left.prompt, left.output, left.images, left.shared) == (5, 17, 1, (), 0)
    assert small.knobs == Knobs(heads=1, topk=1, max_seqs=1, max_len=300, preempt=0, drain=0, acceptance=100)
    assert shrink(case, lambda case: None) == (case, None)


def test_a_case_survives_json() -> None:
    for seed in range(20):
        case = random_case(seed)
        assert Case.from_json(case.to_json()) == case == random_case(seed)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"format": 9}', '{"format": 1}', '{"format": 1, "knobs": {"no": 1}, "requests": [], "steps": 1}',
     '{"format": 1, "seed": 1, "steps": 1, "knobs": {}, "requests": [{"number": 1}]}'],
)  # fmt: skip
def test_a_file_that_holds_no_case(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        load_case(path)
    assert error.value.field == str(path)
    assert cli.main(["fuzz", str(path), "--platform", "cpu"]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_saved_case_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fuzz", "no/such/case.json", "--platform", "cpu"]) == 2
    assert "no/such/case.json" in capsys.readouterr().err


def test_random_cases_run_alike_wherever_they_run() -> None:
    """The engine draws from the case alone: not from the process's random state."""
    random.seed(1)
    first = [(step.queries.tolist(), step.tables["main"].tolist()) for _, _, step in steps_of(range(3))]
    random.seed(2)
    assert [(step.queries.tolist(), step.tables["main"].tolist()) for _, _, step in steps_of(range(3))] == first


def test_a_folder_for_cases_that_is_a_file_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    assert cli.main(["fuzz", "--platform", "cpu", "--steps", "3", "--save", str(taken)]) == 2
    assert "no folder" in capsys.readouterr().err
