"""Rewrite the LLVM IR that Triton made for an AMD chip so that it can be compiled for this CPU.

The code stays as it is, with three exceptions: pointers lose their address space, intrinsics of the chip become calls
into ``machine/``, and so do accesses to shared memory. Calls that make a wave wait carry a number that grows along the
program. What is not known is refused, never skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.tools.simulator import blocks

TYPE = r"(?:ptr|i\d+|half|bfloat|float|double|<\d+ x \w+>|\{[^{}]*\}|\[\d+ x \w+\])"
SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}
# Intrinsics that mean nothing on a machine with coherent memory and no scheduler.
NOTHING = ("s_waitcnt", "sched_barrier", "sched_group_barrier", "s_setprio", "iglp_opt", "wave_barrier", "s_sleep")
# Intrinsics of any operand type: the types at the end of the name do not matter.
ANY_TYPE = (
    "make_buffer_rsrc",
    "ds_read_tr8_b64",
    "ds_read_tr16_b64",
    "mfma_scale_f32_16x16x128_f8f6f4",
    "mfma_scale_f32_32x32x64_f8f6f4",
)
SAME_BITS = {"readlane_f32": "readlane_i32", "update_dpp_f32": "update_dpp_i32"}  # they move 32 bits as they are


SITE = "$site"  # stands for the number of its line until all lines are there


class SimulationError(Exception):
    """A kernel cannot be simulated, or did in simulation what a chip would not forgive."""


@dataclass(frozen=True, slots=True)
class Translation:
    """LLVM IR for this CPU.

    Attributes:
        text: the module; it defines ``void kernel_entry(void **addresses_of_arguments)``.
        arguments: LLVM type of each argument of the kernel, those included that Triton adds.
    """

    text: str
    arguments: tuple[str, ...]


def translate(ir: str, known: frozenset[str]) -> Translation:
    """Rewrite a module.

    Args:
        ir: Triton's ``llir`` of a compiled kernel, for gfx942 or gfx950.
        known: names of the intrinsics that ``machine/`` has.

    Raises:
        SimulationError: the code uses something that is not simulated.
    """
    ir = _without_metadata(ir)
    for line in ir.splitlines():
        if re.match(r"@\S+ = .*addrspace\(3\)", line) and not line.startswith("@global_smem ="):
            raise SimulationError(f"shared memory other than Triton's own: {line}")
        if " asm " in line:
            raise SimulationError(f"inline assembly: {line.strip()}")
    ir, accesses = _shared_memory(ir)
    ir = re.sub(r" ?addrspace\(\d+\)", "", ir)
    ir = re.sub(r"^@global_smem = .*$", "@global_smem = external global [0 x i8], align 16", ir, flags=re.M)
    ir, intrinsics = _intrinsics(ir, known)
    ir = _with_sites(ir)
    ir, entry, arguments = _entry(ir)
    return Translation(f"{ir}\n{accesses}\n{intrinsics}\n{entry}\n", arguments)


def _without_metadata(ir: str) -> str:
    ir = re.sub(r"^(?:target |!|attributes #|source_filename|\s*#dbg_|;).*\n", "", ir, flags=re.M)
    ir = re.sub(r",? !(?:[\w.]+ )?!\d+", "", ir)
    ir = re.sub(r"(?<=declare) !dbg !\d+", "", ir)
    ir = re.sub(r" syncscope\(\"[^\"]*\"\)", "", ir)
    return re.sub(r" #\d+(?=\s|$)", "", ir)


def _shared_memory(ir: str) -> tuple[str, str]:
    """Replace loads and stores in address space 3; returns the module and the functions that it now calls."""
    loaded: dict[str, str] = {}
    stored: dict[str, str] = {}
    lines = []
    for line in ir.splitlines():
        load = re.match(rf"(\s+%\S+ = )load (?:volatile )?({TYPE}), (ptr addrspace\(3\) .+), align \d+$", line)
        store = re.match(rf"(\s+)store (?:volatile )?({TYPE}) (.+), (ptr addrspace\(3\) .+), align \d+$", line)
        if load:
            name = loaded.setdefault(load[2], f"lds_load_{len(loaded)}")
            line = f"{load[1]}call {load[2]} @{name}(i32 {SITE}, {load[3]})"
        elif store:
            name = stored.setdefault(store[2], f"lds_store_{len(stored)}")
            line = f"{store[1]}call void @{name}(i32 {SITE}, {store[2]} {store[3]}, {store[4]})"
        elif re.match(r"\s+(?:%\S+ = )?(?:atomicrmw|cmpxchg) .*addrspace\(3\)", line):
            lines.append(f"  call void @lds_atomic(i32 {SITE})")
        elif re.match(r"\s+(?:%\S+ = )?(?:load|store|ptrtoint|addrspacecast) .*addrspace\(3\)", line):
            raise SimulationError(f"this use of shared memory: {line.strip()}")
        lines.append(line)
    functions = ["declare void @lds_load(i32, ptr, ptr, i32)", "declare void @lds_store(i32, ptr, ptr, i32)"]
    functions.append("declare void @lds_atomic(i32)")
    for kind, name in loaded.items():
        functions.append(
            f"define internal {kind} @{name}(i32 %site, ptr %p) noinline {{\n  %s = alloca {kind}, align 64\n"
            f"  call void @lds_load(i32 %site, ptr %p, ptr %s, i32 {_size(kind)})\n"
            f"  %v = load {kind}, ptr %s\n  ret {kind} %v\n}}"
        )
    for kind, name in stored.items():
        functions.append(
            f"define internal void @{name}(i32 %site, {kind} %v, ptr %p) noinline {{\n  %s = alloca {kind}, align 64\n"
            f"  store {kind} %v, ptr %s\n  call void @lds_store(i32 %site, ptr %p, ptr %s, i32 {_size(kind)})\n"
            "  ret void\n}"
        )
    return "\n".join(lines), "\n".join(functions)


def _intrinsics(ir: str, known: frozenset[str]) -> tuple[str, str]:
    """Replace the chip's intrinsics; returns the module and the functions that it now calls."""
    functions: list[str] = []
    declared: set[str] = set()
    unknown: list[str] = []
    pattern = re.compile(r"^declare (?P<result>.*)@llvm\.amdgcn\.(?P<name>[\w.]+)\((?P<operands>.*)\).*$", re.M)
    for match in list(pattern.finditer(ir)):
        name = match["name"].replace(".", "_")
        result = re.findall(rf"{TYPE}|void", match["result"])[-1]
        operands = [re.match(TYPE, operand)[0] for operand in _split(match["operands"])]  # type: ignore[index]
        target = _handler(name, known)
        if target is None:
            unknown.append(match["name"])
            continue
        ir = ir.replace(match[0], "")
        first, *others = ir.split(f"@llvm.amdgcn.{match['name']}(")
        comma = ", " if operands else ""
        ir = "".join((first, *(f"@wave_{name}(i32 {SITE}{comma}{rest}" for rest in others)))
        functions.append(_wrapper(name, target, result, operands))
        declared.add(target)
    if unknown:
        raise SimulationError(f"not simulated: {', '.join(sorted(unknown))}")
    heads = {"buffer_load": "(ptr, ptr, i32)", "buffer_store": "(ptr, i32)"}
    heads_of = (f"declare void @{name}{heads.get(name, '(i32, ptr, ptr)')}" for name in sorted(declared))
    return ir, "\n".join((*heads_of, *functions))


def _with_sites(ir: str) -> str:
    """Put in the numbers of the lines where a wave waits."""
    match = re.search(r"^define amdgpu_kernel .*\{\n(.*?)^\}$", ir, re.M | re.S)
    if match is None:
        raise SimulationError("no kernel in the module")
    lines = match[1].splitlines()
    numbered = (line.replace(SITE, str(number)) for line, number in zip(lines, blocks.numbers(lines), strict=True))
    return ir[: match.start(1)] + "\n".join(numbered) + "\n" + ir[match.end(1) :]


def _handler(name: str, known: frozenset[str]) -> str | None:
    """Function of ``machine/`` for an intrinsic; None: there is none."""
    if name.startswith(NOTHING):
        return "amd_nothing"
    if name.startswith("raw_ptr_buffer_load_"):
        return "buffer_load"
    if name.startswith("raw_ptr_buffer_store_"):
        return "buffer_store"
    for general in ANY_TYPE:
        if name.startswith(general):
            return f"amd_{general}"
    name = SAME_BITS.get(name, name)
    return f"amd_{name}" if name in known else None


def _wrapper(name: str, target: str, result: str, operands: list[str]) -> str:
    """A function with an intrinsic's own types that hands on addresses."""
    body = [f"  %r = alloca {result if result != 'void' else 'i32'}, align 64"]
    body.append(f"  %a = alloca [{max(len(operands), 1)} x ptr], align 8")
    for i, kind in enumerate(operands):
        body += [
            f"  %s{i} = alloca {kind}, align 64",
            f"  store {kind} %p{i}, ptr %s{i}",
            f"  %g{i} = getelementptr ptr, ptr %a, i32 {i}",
            f"  store ptr %s{i}, ptr %g{i}",
        ]
    if target == "buffer_load":
        body.append(f"  call void @buffer_load(ptr %r, ptr %a, i32 {_size(result)})")
    elif target == "buffer_store":
        body.append(f"  call void @buffer_store(ptr %a, i32 {_size(operands[0])})")
    else:
        body.append(f"  call void @{target}(i32 %site, ptr %r, ptr %a)")
    body += ["  ret void"] if result == "void" else [f"  %v = load {result}, ptr %r", f"  ret {result} %v"]
    parameters = ", ".join(("i32 %site", *(f"{kind} %p{i}" for i, kind in enumerate(operands))))
    return f"define internal {result} @wave_{name}({parameters}) noinline {{\n" + "\n".join(body) + "\n}"


def _entry(ir: str) -> tuple[str, str, tuple[str, ...]]:
    """Strip the kernel's attributes and add a function that takes the addresses of its arguments."""
    heads = re.findall(r"^define amdgpu_kernel .*\{$", ir, re.M)
    if len(heads) != 1:
        raise SimulationError(f"{len(heads)} kernels in one module")
    match = re.match(r"define amdgpu_kernel void @([\w.]+)\((.*)\)[^)]*\{$", heads[0])
    assert match is not None
    parameters = [(re.match(TYPE, p)[0], re.search(r"%\S+$", p)[0]) for p in _split(match[2])]  # type: ignore[index]
    ir = ir.replace(heads[0], f"define internal void @{match[1]}({', '.join(f'{t} {n}' for t, n in parameters)}) {{")
    body = []
    for i, (kind, _) in enumerate(parameters):
        body.append(f"  %g{i} = getelementptr ptr, ptr %args, i32 {i}\n  %s{i} = load ptr, ptr %g{i}")
        body.append(f"  %v{i} = load {kind}, ptr %s{i}")
    call = ", ".join(f"{kind} %v{i}" for i, (kind, _) in enumerate(parameters))
    entry = "define void @kernel_entry(ptr %args) {\n" + "\n".join(body) + f"\n  call void @{match[1]}({call})\n"
    return ir, entry + "  ret void\n}", tuple(kind for kind, _ in parameters)


def _split(text: str) -> list[str]:
    """Parts between commas that are not inside brackets."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "(<{[") - (character in ")>}]")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts


def _size(kind: str) -> int:
    vector = re.match(r"[<\[](\d+) x (\w+)[>\]]$", kind)
    if vector:
        return int(vector[1]) * SIZES[vector[2]]
    if kind not in SIZES:
        raise SimulationError(f"a value of type {kind} in memory")
    return SIZES[kind]
