"""What a compiled kernel takes of its chip, read from what the compiler left: no GPU is asked.

AMD: the metadata at the end of the assembly. NVIDIA: ``cuobjdump``, which comes with Triton. Spilled registers show as
memory of a thread's own; anything there counts, since the project's kernels have no other use for it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTERS = {"cuda": 255, "hip": 512}  # of a thread; AMD: vector registers, accumulators included


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel.

    Attributes:
        registers: 32-bit registers of a thread (AMD: vector registers, accumulators included).
        scalar_registers: registers of a wave; 0 on NVIDIA.
        shared_bytes: shared memory or LDS of a block.
        thread_bytes: memory of a thread's own, into which registers are spilled.
        spilled: registers spilled, where the compiler says so (AMD).
    """

    registers: int
    scalar_registers: int
    shared_bytes: int
    thread_bytes: int
    spilled: int

    def problems(self, vendor: str, spilled_bytes: int = 0) -> tuple[str, ...]:
        """Why the kernel must not ship, one sentence each. Limits of a block are the driver's to enforce.

        Args:
            vendor: "cuda" or "hip".
            spilled_bytes: a thread's own memory that its tuning allows.
        """
        found = []
        if self.thread_bytes > spilled_bytes or (self.spilled and not spilled_bytes):
            allowed = f", at most {spilled_bytes}" if spilled_bytes else ""
            found.append(f"spills: {self.spilled} registers, {self.thread_bytes} bytes a thread{allowed}")
        if self.registers > REGISTERS[vendor]:
            found.append(f"{self.registers} registers a thread, at most {REGISTERS[vendor]}")
        return tuple(found)


def resources_of(compiled: Any) -> Resources:
    """Read a ``CompiledKernel`` of Triton, for NVIDIA or AMD.

    Raises:
        ValueError: the compiler's output does not say what is asked.
    """
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        return _of_assembly(compiled.asm["amdgcn"], shared)
    return _of_cubin(compiled.asm["cubin"], shared)


def _of_assembly(text: str, shared: int) -> Resources:
    fields = ("vgpr_count", "sgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
    vector, scalar, private, spilled = (_number(rf"^\s*\.{field}:\s+(\d+)", text) for field in fields)
    return Resources(vector, scalar, shared, private, spilled)


def _of_cubin(binary: bytes, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (_number(rf"\b{field}:(\d+)", text) for field in ("REG", "STACK", "LOCAL"))
    return Resources(registers, 0, shared, stack + local, 0)


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text, re.M)
    if len(found) != 1:
        raise ValueError(f"{len(found)} matches of {pattern} in the compiler's output, not one")
    return int(found[0])
