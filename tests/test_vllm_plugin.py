"""The vLLM plugin's switch: off it costs nothing, on it replaces what it names, and a vLLM that differs is refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from swa_backend.errors import ConfigError
from swa_backend.integrations.vllm import plugin
from swa_backend.integrations.vllm.plugin import Mode, activate, activation, examine, read_mode
from swa_backend.integrations.vllm.readers import READ_BY
from swa_backend.integrations.vllm.surface import BUILDERS, METADATA_FIELDS, RAGGED_FIELDS, version_reasons
from tests.vllm_fake import FLASHMLA, ROCM, SPARSE_SWA, Fake

ROOT = Path(__file__).parents[1]

LOAD = """
import sys
from importlib import import_module
before = set(sys.modules)
module, _, name = {point!r}.partition(":")
getattr(import_module(module), name)()
print(*sorted(one for one in set(sys.modules) - before if one.partition(".")[0] != "swa_backend_vllm"))
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process that has replaced nothing yet."""
    monkeypatch.setattr(plugin, "_done", None)
    monkeypatch.setenv("SWA_BACKEND_PLATFORM", "cpu")


def entry_point() -> str:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert list(points["vllm.general_plugins"]) == ["swa_backend"]
    point: str = points["vllm.general_plugins"]["swa_backend"]
    return point


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_the_variable_the_entry_point_imports_nothing(value: str | None) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'platforms'}"}
    env.pop("SWA_BACKEND_VLLM", None)
    if value is not None:
        env["SWA_BACKEND_VLLM"] = value
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(point=entry_point())], env=env, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_with_the_variable_and_without_vllm_the_entry_point_says_so() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'platforms'}", "SWA_BACKEND_VLLM": "metadata"}
    code = "import sys\nsys.modules['vllm'] = None\n" + LOAD.format(point=entry_point())
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "vLLM cannot be imported" in done.stderr


@pytest.mark.parametrize(("value", "mode"), [("metadata", Mode.METADATA), (" Attention ", Mode.ATTENTION)])
def test_modes(value: str, mode: Mode) -> None:
    assert read_mode(value) is mode


@pytest.mark.parametrize("value", ["1", "on", "metadata,attention", "meta"])
def test_an_unknown_mode_is_refused_with_the_legal_ones(value: str) -> None:
    with pytest.raises(ConfigError, match="metadata, attention") as caught:
        activate(value, Fake().load)
    assert caught.value.field == "SWA_BACKEND_VLLM"
    assert activation() is None


@pytest.mark.parametrize("version", ["0.33", "0.33.0", "0.33.2", "0.33.0+cu129"])
def test_supported_versions(version: str) -> None:
    assert version_reasons(version) == []


@pytest.mark.parametrize("version", ["0.32.9", "0.34.0", "0.3.3", "0.330.0", "1.33.0", "dev", "0.34.0rc1"])
def test_an_older_or_newer_vllm_is_refused_before_anything_of_it_is_imported(version: str) -> None:
    fake = Fake(version)
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return fake.load(name)

    before = fake.sparse_swa.DeepseekV4SWACache.get_attn_backend
    with pytest.raises(ConfigError, match=r"made for 0\.33\.x") as caught:
        activate("metadata", load)
    assert version in str(caught.value)
    assert asked == ["vllm"]
    assert fake.sparse_swa.DeepseekV4SWACache.get_attn_backend is before
    assert activation() is None


def _without(name: str) -> Any:
    return lambda sparse_swa: delattr(sparse_swa, name)


def _other_fields(sparse_swa: Any) -> None:
    names = [*sorted(METADATA_FIELDS - {"decode_swa_lens"}), "decode_block_lens"]
    sparse_swa.DeepseekSparseSWAMetadata = make_dataclass(
        "DeepseekSparseSWAMetadata",
        [(name, Any, field(default=None)) for name in names],
        namespace={"get_prefill_chunk_plan": lambda self: []},
    )


def _other_build(sparse_swa: Any) -> None:
    sparse_swa.DeepseekSparseSWAMetadataBuilder.build = lambda self, common_attn_metadata: None


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (_without("DeepseekV4SWACache"), ["has no DeepseekV4SWACache.get_attn_backend"]),
        (_without("get_mla_metadata"), ["has no get_mla_metadata"]),
        (
            _other_fields,
            [
                "has no decode_swa_lens",
                "has decode_block_lens, which nothing here fills",
                "deepseek_v4.nvidia.flashmla reads decode_swa_lens, which the metadata has not",
            ],
        ),
        (_other_build, ["build takes self, common_attn_metadata, not self, common_prefix_len"]),
    ],
    ids=["no cache", "no plans", "other fields", "other build"],
)
def test_a_vllm_that_differs_is_refused_with_every_reason(change: Any, reasons: list[str]) -> None:
    fake = Fake()
    change(fake.sparse_swa)
    cache_cls = getattr(fake.sparse_swa, "DeepseekV4SWACache", None)
    before = getattr(cache_cls, "get_attn_backend", None)
    with pytest.raises(ConfigError) as caught:
        activate("metadata", fake.load)
    for reason in reasons:
        assert reason in str(caught.value)
    assert getattr(cache_cls, "get_attn_backend", None) is before
    assert activation() is None


def test_a_batch_without_what_is_read_of_it_is_refused() -> None:
    fake = Fake()
    fake.modules["vllm.v1.attention.backend"].CommonAttentionMetadata = make_dataclass("Batch", ["seq_lens"])
    version, reasons = examine(Mode.METADATA, fake.load)
    assert version == "0.33.0"
    assert any("CommonAttentionMetadata has no" in reason and "slot_mapping" in reason for reason in reasons)


def test_activation_swaps_the_builders_of_every_window_backend(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake().install(monkeypatch)
    caches = {
        "base": fake.sparse_swa.DeepseekV4SWACache(),
        "flashmla": fake.sparse_swa.DeepseekV4SWACache(fake.modules[FLASHMLA].DeepseekSparseSWAFlashMLABackend),
        "rocm": fake.sparse_swa.DeepseekV4SWACache(fake.modules[ROCM].DeepseekV4ROCMAiterSparseSWABackend),
    }
    before = {name: cache.get_attn_backend() for name, cache in caches.items()}
    with caplog.at_level(logging.INFO, "vllm"):
        done = activate("metadata", fake.load)
    assert activation() is done
    assert list(done.replaced) == [f"{SPARSE_SWA}.DeepseekV4SWACache.get_attn_backend"]
    assert [record.name.partition(".")[0] for record in caplog.records] == ["vllm"]
    assert "metadata" in caplog.text
    assert "get_attn_backend" in caplog.text
    for name, cache in caches.items():
        swapped = cache.get_attn_backend()
        assert swapped is not before[name]
        assert swapped is cache.get_attn_backend()
        assert issubclass(swapped, before[name])
        assert swapped.get_name() == before[name].get_name()
        builder_cls = swapped.get_builder_cls()
        assert issubclass(builder_cls, before[name].get_builder_cls())
        assert builder_cls.__module__.startswith("swa_backend.")
        assert before[name].get_builder_cls().__module__.startswith("vllm.")  # vLLM's own classes stay as they are


def test_activation_happens_once_a_process() -> None:
    fake = Fake()
    first = activate("metadata", fake.load)
    swapped = fake.sparse_swa.DeepseekV4SWACache.get_attn_backend
    assert activate("metadata", fake.load) is first
    assert fake.sparse_swa.DeepseekV4SWACache.get_attn_backend is swapped


def test_an_unknown_builder_is_refused_by_name() -> None:
    fake = Fake()
    activate("metadata", fake.load)
    other = type("OtherBuilder", (fake.sparse_swa.DeepseekSparseSWAMetadataBuilder,), {"__module__": "vllm.other"})
    backend = type("Other", (), {"get_builder_cls": staticmethod(lambda: other)})
    with pytest.raises(ConfigError, match=r"vllm\.other\.OtherBuilder"):
        fake.sparse_swa.DeepseekV4SWACache(backend).get_attn_backend()


def test_everything_that_is_read_is_a_field_that_is_known() -> None:
    known = METADATA_FIELDS | RAGGED_FIELDS | {"get_prefill_chunk_plan"}
    read = {name for names in READ_BY.values() for name in names.split()}
    assert read <= known
    assert len(READ_BY) > 10
    assert set(BUILDERS.values()) == {"dense", "ragged"}
