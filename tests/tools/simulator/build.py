"""Build a translated kernel together with the machine it runs on, and call it.

Triton's own LLVM compiles the kernel (it has a back end for the CPU), the system's C compiler the machine and the
library: nothing else is needed, and both always understand each other's IR.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import llvm

from tests.tools.simulator.translate import SimulationError, translate

MACHINE = Path(__file__).parent / "machine"
TRIPLE = "x86_64-unknown-linux-gnu"
CTYPES = {
    "ptr": ctypes.c_void_p,
    "i1": ctypes.c_uint8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def why_not() -> str | None:
    """Why kernels cannot be simulated on this machine; None: they can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the simulator runs on Linux x86-64 only"
    return None if shutil.which("cc") else "the simulator needs a C compiler (cc)"


class SimulatedKernel:
    """A kernel as a library of this machine."""

    def __init__(self, compiled: Any) -> None:
        """Translate and build.

        Args:
            compiled: a kernel that Triton compiled for gfx942 or gfx950.

        Raises:
            SimulationError: the kernel cannot be simulated, or a tool is missing.
        """
        if problem := why_not():
            raise SimulationError(problem)
        translation = translate(compiled.asm["llir"], _known())
        self.arguments = translation.arguments
        metadata = compiled.metadata
        self.lanes = metadata.target.warp_size
        self.items = metadata.num_warps * self.lanes
        self.gfx950 = metadata.target.arch == "gfx950"
        self._library = ctypes.CDLL(str(_build(translation.text)))
        self._library.run_grid.restype = ctypes.c_char_p

    def run(self, grid: Sequence[int], values: Sequence[Any], *, backwards: bool = False) -> None:
        """Run a grid to its end.

        Args:
            grid: programs in three dimensions.
            values: numbers and addresses for the kernel's arguments in order; those that Triton added get 0.
            backwards: let the last wave of a workgroup go first.

        Raises:
            SimulationError: a race, a barrier that not all reach, or something that is not simulated.
        """
        padded = [*values, *[0] * (len(self.arguments) - len(values))]
        cells = [CTYPES[kind](value) for kind, value in zip(self.arguments, padded, strict=True)]
        addresses = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        problem = self._library.run_grid(
            addresses, self.items, self.lanes, int(self.gfx950), int(backwards), *(ctypes.c_uint32(n) for n in grid)
        )
        if problem:
            raise SimulationError(problem.decode())


@cache
def _known() -> frozenset[str]:
    names: set[str] = set()
    for source in MACHINE.glob("*.c"):
        names.update(re.findall(r"^(?:INTRINSIC|WAVE_INTRINSIC|PRODUCT)\((\w+)", source.read_text(), re.M))
    return frozenset(names)


def _build(ir: str) -> Path:
    sources = sorted(MACHINE.glob("*.[ch]"))
    machine_key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = Path(knobs.cache.dir) / "simulator" / machine_key
    library = folder / f"{hashlib.sha256(ir.encode()).hexdigest()[:24]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    machine = folder / "machine.o"
    if not machine.exists():
        _make(machine, "-O2", "-fPIC", "-r", "-nostdlib", *(str(s) for s in sources if s.suffix == ".c"))
    kernel = library.with_suffix(f".{os.getpid()}.o")
    kernel.write_bytes(_compile(ir))
    _make(library, "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", str(kernel), str(machine), "-lm")
    kernel.unlink()
    return library


def _compile(ir: str) -> bytes:
    llvm.init_targets()
    # The options after the first four differ between versions of Triton; all may be off.
    options: list[Any] = [[], False, True]
    if "canonicalize_gep" in (llvm.translate_to_asm.__doc__ or ""):
        options.append(False)
    try:
        code: bytes = llvm.translate_to_asm(ir, TRIPLE, "x86-64", "", *options)
    except Exception as error:  # Triton raises nothing narrower
        raise SimulationError(f"the translated kernel does not compile: {error}") from error
    return code


def _make(output: Path, *arguments: str) -> None:
    """Run the C compiler; the file appears complete or not at all, whoever else makes it."""
    part = output.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run(["cc", *arguments, "-o", str(part)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimulationError(f"cc: {done.stderr.strip()}")
    part.replace(output)
