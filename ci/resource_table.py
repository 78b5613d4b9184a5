"""Compile the library's kernels for one chip that is not here, and print what each takes of it.

``python -m ci.resource_table cuda:90 [--short] [--json FILE]``; ``--short`` compiles one key of each kernel. Exit
code 1 if a kernel spills, does not fit the chip, or does not compile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources as data_files
from pathlib import Path
from typing import Any

import torch

from ci.matrix import MATRIX
from swa_backend import get_backend
from swa_backend.config import BackendConfig, SpeculativeConfig
from swa_backend.kernels.jit import Kernel, all_kernels
from swa_backend.kernels.offline import OfflineDriver, compile_only
from swa_backend.platform import CacheRole, Target
from tests.tools.resources import Resources, resources_of

CAPACITY: Mapping[str, Any] = {"max_model_len": 131_072, "max_num_seqs": 256, "max_num_batched_tokens": 8192}


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel and key on one chip; without resources, `problems` says why."""

    target: str
    kernel: str
    key: Mapping[str, object]
    seconds: float
    resources: Resources | None
    problems: tuple[str, ...]


def load_kernels() -> tuple[Kernel, ...]:
    """Every kernel of the packages that the matrix names."""
    for name in MATRIX["kernels"]["packages"]:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    return all_kernels()


def configs() -> Iterator[BackendConfig]:
    """The matrix's configurations."""
    folder = data_files.files("swa_backend") / "replay" / "data" / "models"
    for entry in MATRIX["config"]:
        model = json.loads((folder / f"{entry['model']}.json").read_text())
        drafting = SpeculativeConfig(**entry["speculative"]) if "speculative" in entry else None
        yield BackendConfig.from_hf_config(model, speculative=drafting, **CAPACITY)


def keys_of(kernel: Kernel, target: Target) -> list[Mapping[str, object]]:
    """Every key that the configurations need of a kernel on a chip, each once."""
    backend = get_backend(MATRIX["platform"][target.vendor], target=target)
    dialects = {role: backend.cache_dialect(role) for role in CacheRole}
    found = (key for config in configs() for key in kernel.keys(config, dialects))
    return list({tuple(key.items()): key for key in found}.values())


def compile_key(driver: OfflineDriver, kernel: Kernel, key: Mapping[str, object]) -> Entry:
    """Compile one key. Whatever the compiler raises becomes a problem of the entry: the table is to be complete."""
    start, before = time.monotonic(), len(driver.compiled)
    found: Resources | None = None
    problems: tuple[str, ...]
    try:
        kernel.on(torch.device("cpu"), **key).compile()
        (compiled,) = driver.compiled[before:]
        found = resources_of(compiled)
        problems = found.problems(driver.target.vendor, kernel.tuning_for(driver.target).spilled_bytes)
    except Exception as error:
        problems = (f"{type(error).__name__}: {error}",)
    return Entry(str(driver.target), kernel.name, dict(key), round(time.monotonic() - start, 2), found, problems)


def make_table(target: Target, *, short: bool) -> list[Entry]:
    """Compile for a chip; kernels without a tuning for it are left out."""
    entries = []
    with compile_only(target) as driver:
        for kernel in load_kernels():
            if kernel.tuning.keys().isdisjoint((str(target), target.vendor, "")):
                continue
            keys = keys_of(kernel, target)
            entries += [compile_key(driver, kernel, key) for key in (keys[:1] if short else keys)]
    return entries


def line(entry: Entry) -> str:
    """An entry as a row of text."""
    key = " ".join(f"{name}={value}" for name, value in entry.key.items())
    cells = ["-"] * 4
    if (r := entry.resources) is not None:
        cells = [str(n) for n in (r.registers, r.scalar_registers, r.shared_bytes, r.thread_bytes)]
    text = f"{entry.target:10} {entry.kernel:20} {cells[0]:>5} {cells[1]:>5} {cells[2]:>7} {cells[3]:>6} "
    text += f"{entry.seconds:6.1f}s  {key}"
    return "\n".join((text, *(f"    PROBLEM {problem}" for problem in entry.problems)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Target.parse)
    parser.add_argument("--short", action="store_true", help="one key of each kernel")
    parser.add_argument("--json", type=Path, help="also write the table there")
    options = parser.parse_args()
    entries = make_table(options.target, short=options.short)
    print(f"{'target':10} {'kernel':20} {'regs':>5} {'sregs':>5} {'shared':>7} {'spill':>6} {'compile':>7}  key")
    for entry in entries:
        print(line(entry))
    bad = sum(bool(entry.problems) for entry in entries)
    kernels = len({entry.kernel for entry in entries})
    print(f"{options.target}: {kernels} kernels, {len(entries)} keys compiled, {bad} with problems")
    if options.json:
        options.json.write_text(json.dumps([asdict(entry) for entry in entries], indent=1, default=str))
    if not entries:
        print(f"{options.target}: no kernel was found")
    return 1 if bad or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
