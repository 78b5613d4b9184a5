"""Our own Hopper decode on a GPU: the semantic suite, recorded cases, random inputs beside float64 and FlashMLA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

for helper in ("attention_scene", "attention_suite", "flashmla_golden", "gpu.captured_step"):
    pytest.register_assert_rewrite(f"tests.{helper}")

from swa_backend.cache_layout import get_layout  # noqa: E402
from swa_backend.errors import CacheError  # noqa: E402
from swa_backend.pages import PageView  # noqa: E402
from swa_backend.provider import AttentionCall, AttentionShape, CompressedRows  # noqa: E402
from swa_backend.provider_choice import choose_provider  # noqa: E402
from swa_backend.registry import get_backend  # noqa: E402
from tests.attention_scene import ProviderUnderTest, Scene, floats  # noqa: E402
from tests.attention_suite import *  # noqa: E402, F403
from tests.flashmla_golden import golden_call  # noqa: E402
from tests.gpu.captured_step import check_replays  # noqa: E402
from tests.oracle_attention import relative_error, worst_row_error  # noqa: E402
from tests.support import GOLDEN, load_golden  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
SCALE = 512**-0.5
V4 = get_layout("fp8_ds_mla")
INF, NAN = torch.inf, torch.nan


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> ProviderUnderTest:
    monkeypatch.setenv("SWA_BACKEND_ATTENTION", "hopper")
    monkeypatch.delenv("SWA_BACKEND_VALIDATE", raising=False)
    return ProviderUnderTest("hopper", get_backend("cuda"), "cuda:0")


def shape_of(heads: int = 64, batch_invariant: bool = False) -> AttentionShape:
    return AttentionShape(heads, 512, V4, 64, (V4,), (128,), batch_invariant, DEVICE)


def chosen(name: str, heads: int = 64) -> Any:
    """A provider of this machine by its name; None with its reasons printed where it does not serve."""
    (found,) = (one for one in get_backend("cuda").providers if one.name == name)
    reasons = found.supports(shape_of(heads))
    print(*reasons, sep="\n")
    return None if reasons else found


# Random inputs.


def pages_of(count: int, entries: int, generator: torch.Generator, apart: int = 0) -> tuple[PageView, torch.Tensor]:
    """A cache whose pages lie ``apart`` bytes further apart than they are long, and its keys [slots, 512] float64."""
    size = V4.page_bytes(entries) + apart
    memory = torch.full((count, size), 0xFF, dtype=torch.uint8, device=DEVICE)
    codes = torch.randint(0, 256, (count, entries, 448), generator=generator, device=DEVICE, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3B
    rope = torch.randn(count, entries, 64, generator=generator, device=DEVICE).mul(60).bfloat16()
    exponents = torch.randint(120, 126, (count, entries, 7), generator=generator, device=DEVICE, dtype=torch.uint8)
    rows = memory[:, : entries * 576].view(count, entries, 576)
    rows[:, :, :448], rows[:, :, 448:] = codes, rope.view(torch.uint8).view(count, entries, 128)
    last = memory[:, entries * 576 : entries * 584].view(count, entries, 8)
    last[:, :, :7], last[:, :, 7] = exponents, 0
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().to(DEVICE)
    nope = table[codes.long()] * torch.exp2(exponents.double() - 127).repeat_interleave(64, dim=2)
    keys = torch.cat([nope, rope.double()], dim=2).view(-1, 512)
    view = PageView.of(memory.as_strided((count, entries, 584), (size, 584, 1)), V4, entries)
    return view, keys


def rows_of(n: int, width: int, slots: int, generator: torch.Generator, holes: float) -> torch.Tensor:
    rows = torch.randint(0, slots, (n, width), generator=generator, device=DEVICE, dtype=torch.int32)
    wild = torch.tensor([-1, -1, -2, slots, slots + 7, 2**31 - 1, -(2**31)], dtype=torch.int32, device=DEVICE)
    hit = torch.rand(n, width, generator=generator, device=DEVICE) < holes
    picks = torch.randint(0, len(wild), (n, width), generator=generator, device=DEVICE)
    return torch.where(hit, wild[picks], rows)


def make_call(
    n: int, heads: int, windows: tuple[Any, ...], second: tuple[Any, ...] | None, generator: torch.Generator,
    batch_invariant: bool = False,
) -> AttentionCall:  # fmt: skip
    """A decode of n tokens over (pages, rows, lens) of one cache or two."""
    pages, rows, lens = windows
    q = torch.randn(n, heads, 512, generator=generator, device=DEVICE).mul(0.2).bfloat16()
    metadata = SimpleNamespace(
        num_decode_tokens=n, num_tokens=n, plans={}, decode_swa_indices=rows.unsqueeze(1), decode_swa_lens=lens,
        is_valid_token=torch.rand(n, generator=generator, device=DEVICE) < 0.95, generation=next(_steps), compressed={},
        shape=shape_of(heads, batch_invariant),
    )  # fmt: skip
    return AttentionCall(
        q=q, out=torch.full_like(q, NAN), lse=torch.full((n, heads), NAN, device=DEVICE),
        metadata=metadata, pages=pages, attn_sink=torch.linspace(-2, 2, heads, device=DEVICE), scale=SCALE,
        compressed=None if second is None else CompressedRows(second[0], 4, second[1], second[2]),
    )  # type: ignore[arg-type]  # fmt: skip


_steps = iter(range(1, 10**9))


def expected(call: AttentionCall, tables: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64; ``tables`` the keys of each cache."""
    n, heads, _ = call.q.shape
    out = torch.zeros(n, heads, 512, dtype=torch.float64, device=DEVICE)
    lse = torch.full((n, heads), -INF, dtype=torch.float64, device=DEVICE)
    parts = [(call.metadata.decode_swa_indices.squeeze(1), call.metadata.decode_swa_lens)]
    if call.compressed is not None:
        parts.append((call.compressed.rows, call.compressed.lens))
    for t in range(n):
        seen = []
        for table, (rows, lens) in zip(tables, parts, strict=True):
            own = rows[t, : min(max(int(lens[t]), 0), rows.shape[1])].long()
            seen.append(table[own[(own >= 0) & (own < len(table))]])
        keys = torch.cat(seen)
        if not len(keys) or not call.metadata.is_valid_token[t]:
            continue
        logits = call.scale * (call.q[t].double() @ keys.T)
        lse[t] = torch.logsumexp(logits, dim=1)
        whole = torch.logaddexp(lse[t], call.attn_sink.double())
        out[t] = torch.exp(logits - whole[:, None]) @ keys
    return out, lse


def random_case(seed: int) -> tuple[AttentionCall, list[torch.Tensor]]:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    pick = torch.Generator().manual_seed(seed)

    def one_of(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=pick))]

    n, heads = one_of(1, 3, 17, 60, 140), one_of(1, 5, 8, 16, 64, 96, 128)
    holes = one_of(0, 5, 30) / 100
    entries, width = one_of(32, 64, 96, 128, 256), one_of(128, 192, 256)
    view, keys = pages_of(40, entries, generator, apart=one_of(0, 576, 16, 1_000_000 // 16 * 16))
    lens = torch.randint(-2, width + 3, (n,), generator=generator, device=DEVICE, dtype=torch.int32)
    window = view, rows_of(n, width, view.num_slots, generator, holes), lens
    tables, second = [keys], None
    if one_of(0, 1, 1):
        entries, width = one_of(1, 2, 16, 48, 64), one_of(1, 64, 512, 700, 3000)
        more, more_keys = pages_of(500, entries, generator, apart=one_of(0, 576))
        lens = torch.randint(-2, width + 3, (n,), generator=generator, device=DEVICE, dtype=torch.int32)
        if one_of(0, 1):
            lens[torch.rand(n, generator=generator, device=DEVICE) < 0.8] = 3
        second = more, rows_of(n, width, more.num_slots, generator, holes), lens
        tables.append(more_keys)
    return make_call(n, heads, window, second, generator, bool(one_of(0, 0, 1))), tables


def check_call(call: AttentionCall, tables: list[torch.Tensor]) -> float:
    """The relative error, after comparing everything that has an exact answer."""
    out, lse = expected(call, tables)
    assert call.lse is not None
    empty = torch.isneginf(lse)
    assert torch.equal(torch.isneginf(call.lse), empty)
    assert not call.out[empty].any()
    torch.testing.assert_close(call.lse.double()[~empty], lse[~empty], atol=1e-4, rtol=0)
    error = relative_error(floats(call.out), floats(out))
    assert error <= 3e-3
    assert worst_row_error(floats(call.out), floats(out)) <= 4e-3
    return error


@pytest.mark.parametrize("seed", range(40))
def test_random_rows_over_poisoned_pages(provider: ProviderUnderTest, seed: int) -> None:
    """Unreferenced bytes, the padding of pages among them, are 0xFF."""
    call, tables = random_case(seed)
    hopper = chosen("hopper", call.q.shape[1])
    hopper.decode(call)
    first = call.out.clone(), call.lse.clone()
    error = check_call(call, tables)
    call.out.fill_(NAN)
    hopper.decode(call)
    assert torch.equal(call.out, first[0]), "a repeat gives the same bits"
    assert torch.equal(call.lse, first[1])
    if call.metadata.shape.batch_invariant:  # FlashMLA has no such mode here
        return
    flashmla = chosen("flashmla", call.q.shape[1])
    second = 64 if call.compressed is None else call.compressed.pages.entries
    if flashmla is None or call.pages.entries % 64 or second not in (2, 64):
        return
    call.out.fill_(NAN)
    flashmla.decode(call)
    theirs = relative_error(floats(call.out), floats(expected(call, tables)[0]))
    print(f"relative error {error:.2e}, FlashMLA {theirs:.2e}")
    assert error <= 1.1 * theirs + 1e-6


@pytest.mark.parametrize("name", ["decode_c4a_h64", "decode_swaonly_h64"])
def test_recorded_attention(provider: ProviderUnderTest, name: str) -> None:
    case = load_golden(GOLDEN / "attention" / f"{name}.npz")
    call = golden_call(case, provider.device)
    call.metadata.num_tokens = call.metadata.num_decode_tokens
    chosen("hopper").decode(call)
    recorded = case.tensor("out").reshape(call.out.shape)
    assert relative_error(floats(call.out), floats(recorded)) <= 3e-3
    assert worst_row_error(floats(call.out), floats(recorded)) <= 4e-3
    lse = case.tensor("lse").reshape(call.lse.shape)
    lse = lse.masked_fill(lse == INF, -INF)
    torch.testing.assert_close(call.lse.cpu(), lse, atol=1e-4, rtol=0)


def test_c7_every_code_under_every_scale_is_exact(provider: ProviderUnderTest) -> None:
    """A token that sees one key, with a sink of -inf and a query of zeros, comes out as that key."""
    hopper = chosen("hopper", 1)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    table = codes.cpu().view(torch.float8_e4m3fn).double().to(DEVICE)
    for byte in range(256):
        memory = torch.zeros(4, V4.page_bytes(64), dtype=torch.uint8, device=DEVICE)
        memory[:, : 64 * 576].view(4, 64, 576)[:, :, :448] = codes.view(4, 64, 1)
        memory[:, 64 * 576 : 64 * 584] = byte
        view = PageView.of(memory.as_strided((4, 64, 584), (memory.stride(0), 584, 1)), V4, 64)
        rows = torch.arange(256, dtype=torch.int32, device=DEVICE)[:, None].contiguous()
        generator = torch.Generator(DEVICE).manual_seed(0)
        call = make_call(256, 1, (view, rows, torch.ones_like(rows[:, 0])), None, generator)
        call.metadata.is_valid_token.fill_(True)
        call.q.zero_()
        call.attn_sink.fill_(-INF)
        hopper.decode(call)
        scale = 2.0 ** (byte - 127) if byte < 255 else NAN
        right = (table * scale).float().bfloat16()[:, None].expand(256, 448)
        found = call.out[:, 0, :448]
        fits = torch.isfinite(right) | torch.isnan(right)  # a product past bf16 is infinite, and 0 x inf no number
        same = (found == right) | (torch.isnan(found) & torch.isnan(right))
        assert same[fits].all(), f"scale byte {byte}, codes {codes[~(same | ~fits).all(dim=1)].tolist()}"


def test_nan_codes_in_keys_that_are_seen_and_in_others(provider: ProviderUnderTest) -> None:
    generator = torch.Generator(DEVICE).manual_seed(5)
    view, _ = pages_of(10, 64, generator)
    rows = torch.arange(600, dtype=torch.int32, device=DEVICE).view(6, 100)
    call = make_call(6, 64, (view, rows, torch.full((6,), 90, dtype=torch.int32, device=DEVICE)), None, generator)
    call.metadata.is_valid_token.fill_(True)
    hopper = chosen("hopper")
    hopper.decode(call)
    clean = call.out.clone()
    assert torch.isfinite(clean).all()
    for slot, hit in ((130, 1), (190, 1), (299, None), (595, None), (400, 4)):  # past 90 of a row nothing is seen
        page, entry = slot // 64, slot % 64
        for at, code in ((entry * 576 + 3, 0x7F), (entry * 576 + 447, 0xFF), (64 * 576 + entry * 8 + 6, 0xFF)):
            kept = int(view.data[page, at])
            view.data[page, at] = code
            hopper.decode(call)
            view.data[page, at] = kept
            if slot == 190:
                hit = None
            for t in range(6):
                assert torch.isnan(call.out[t]).all() if t == hit else torch.equal(call.out[t], clean[t]), (slot, at, t)


def test_c1_offsets_beyond_2_gib(provider: ProviderUnderTest) -> None:
    generator = torch.Generator(DEVICE).manual_seed(2)
    pages = 62_000  # of 37,440 bytes
    memory = torch.full((pages, 37_440), 0xFF, dtype=torch.uint8, device=DEVICE)
    view = PageView.of(memory.as_strided((pages, 64, 584), (37_440, 584, 1)), V4, 64)
    slots = [3_670_911, 3_670_912, 3_670_913, 3_670_976, 3_671_040, pages * 64 - 1]
    _, keys = small = pages_of(1, 64, generator)
    for at, slot in enumerate(slots):
        page, entry = slot // 64, slot % 64
        memory[page, entry * 576 : entry * 576 + 576] = small[0].data[0, at * 576 : at * 576 + 576]
        memory[page, 64 * 576 + entry * 8 :][:8] = small[0].data[0, 64 * 576 + at * 8 :][:8]
    rows = torch.tensor([slots], dtype=torch.int32, device=DEVICE)
    call = make_call(1, 64, (view, rows, torch.full((1,), 6, dtype=torch.int32, device=DEVICE)), None, generator)
    call.metadata.is_valid_token.fill_(True)
    chosen("hopper").decode(call)
    first_six = torch.arange(6, dtype=torch.int32, device=DEVICE)[None]
    compact = make_call(1, 64, (small[0], first_six, call.metadata.decode_swa_lens), None, generator)
    compact.q.copy_(call.q)
    compact.metadata.is_valid_token.fill_(True)
    out, lse = expected(compact, [keys])
    assert relative_error(floats(call.out), floats(out)) <= 3e-3
    torch.testing.assert_close(call.lse.double(), lse, atol=1e-4, rtol=0)


def test_n5_a_row_alone_equals_the_row_among_long_and_short_ones(provider: ProviderUnderTest) -> None:
    generator = torch.Generator(DEVICE).manual_seed(8)
    view, _ = pages_of(40, 64, generator)
    more, _ = pages_of(400, 64, generator)
    lens = torch.randint(0, 129, (150,), generator=generator, device=DEVICE, dtype=torch.int32)
    more_lens = torch.randint(0, 8192, (150,), generator=generator, device=DEVICE, dtype=torch.int32)
    window = view, rows_of(150, 128, view.num_slots, generator, 0.05), lens
    second = more, rows_of(150, 8192, more.num_slots, generator, 0.05), more_lens
    whole = make_call(150, 64, window, second, generator, batch_invariant=True)
    hopper = chosen("hopper")
    hopper.decode(whole)
    for t in (0, 1, 77, 149):
        own = slice(t, t + 1)
        one, other = ((pages, rows[own].contiguous(), n[own].contiguous()) for pages, rows, n in (window, second))
        alone = make_call(1, 64, one, other, generator, batch_invariant=True)
        alone.q.copy_(whole.q[own])
        alone.metadata.is_valid_token.copy_(whole.metadata.is_valid_token[own])
        hopper.decode(alone)
        assert torch.equal(alone.out[0], whole.out[t])
        assert torch.equal(alone.lse[0], whole.lse[t])


def test_a_cache_that_the_kernel_cannot_read_is_refused(provider: ProviderUnderTest) -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    lens = torch.ones(1, dtype=torch.int32, device=DEVICE)
    size = V4.page_bytes(64) + 8
    memory = torch.zeros(5 * size + 16, dtype=torch.uint8, device=DEVICE)
    for start, stride, field in ((0, size, "cache page stride"), (8, size - 8, "cache address")):
        view = PageView.of(memory[start:].as_strided((4, 64, 584), (stride, 584, 1), start), V4, 64)
        call = make_call(1, 64, (view, lens[None] * 0, lens), None, generator)
        with pytest.raises(CacheError) as error:
            chosen("hopper").decode(call)
        assert error.value.field == field


# Graphs.


def test_g5_g6_t3_a_captured_step_equals_an_eager_one_bit_for_bit(provider: ProviderUnderTest) -> None:
    check_replays(layers=2)


def test_nothing_is_allocated_by_a_call(provider: ProviderUnderTest) -> None:
    scene = Scene(provider, [1] * 4, [300] * 4, heads=64, second=(4, "fp8_ds_mla", 256))
    compressed = scene.topk(torch.arange(40)[None].expand(4, 40).contiguous())
    out = torch.empty_like(scene.q)
    for _ in range(2):
        scene.run(compressed=compressed, out=out, return_lse=False)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        scene.run(compressed=compressed, out=out, return_lse=False)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_hopper_serves_where_it_is_named_only(provider: ProviderUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_provider(get_backend("cuda"), shape_of()).name == "hopper"
    monkeypatch.delenv("SWA_BACKEND_ATTENTION")
    assert choose_provider(get_backend("cuda"), shape_of()).name != "hopper"
