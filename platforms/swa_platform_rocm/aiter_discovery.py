"""Looks for the aiter kernels that read DeepSeek-V4's packed cache, and says why there are none.

aiter has had them under two names. `sparse_mla_fwd` is the current one, `pa_decode_sparse` the one before; both names
also exist in versions that cannot do what is asked here, so it is the signature that decides. Importing either asks
the driver for the GPU and compiles for it: nothing is imported unless the device of this machine is a gfx950.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

ARCH = "gfx950"
DISTRIBUTION = "amd-aiter"
Importer = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Form:
    """One published function.

    Attributes:
        module: where it lives.
        function: its name.
        needed: arguments that a call passes, all by keyword.
        optional: an argument that is passed where there is one.
    """

    module: str
    function: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


CURRENT = Form(
    "aiter.ops.triton.attention.sparse_mla",
    "sparse_mla_fwd",
    (
        "q", "kv_buffer", "kv_indptr", "kv_indices", "softmax_scale", "kv_lora_rank", "qk_rope_head_dim", "kv_splits",
        "has_invalid", "out", "return_lse", "attn_sink", "extra_kv", "extra_indptr", "extra_indices",
    ),
)  # fmt: skip
OLD = Form(
    "aiter.ops.triton.attention.pa_decode_sparse",
    "pa_decode_sparse",
    (
        "q", "unified_kv", "kv_indices", "kv_indptr", "attn_sink", "softmax_scale", "kv_splits", "has_invalid",
        "extra_cache", "extra_indices", "extra_indptr",
    ),
    ("out",),
)  # fmt: skip

# What the old form's module imports since it addresses a cache by its strides. Before that, pages that lie further
# apart than they are long were read from the wrong place once a cache spanned 2 GiB.
_STRIDE_FIX = "max_addressable_bytes"


@dataclass(frozen=True, slots=True)
class AiterKernel:
    """A function that serves, and how it is called.

    Attributes:
        form: which of the published functions it is.
        function: the function.
        arguments: every argument it takes that the form names.
    """

    form: Form
    function: Callable[..., Any]
    arguments: frozenset[str]

    @property
    def exact_partials(self) -> bool:
        """Whether the partial results of a split stay float32.

        Since aiter writes to a buffer of the caller, it rounds them to bf16: rows were off by 6e-3 then.
        """
        return "out" not in self.arguments


@dataclass(frozen=True, slots=True)
class Found:
    """The kernel, or the reasons why there is none."""

    kernel: AiterKernel | None
    reasons: tuple[str, ...]


def find_aiter(importer: Importer = import_module) -> Found:
    """The first form that is installed and complete. Imports aiter: check the architecture before."""
    reasons: list[str] = []
    for form in (CURRENT, OLD):
        found = _look_for(form, importer)
        if isinstance(found, AiterKernel):
            return Found(found, ())
        if found not in reasons:
            reasons.append(found)
    return Found(None, tuple(reasons))


def _look_for(form: Form, importer: Importer) -> AiterKernel | str:
    try:
        module = importer(form.module)
    except ModuleNotFoundError as error:
        if error.name == "aiter":
            return "aiter is not installed (the README says where to get it)"
        if error.name and f"{form.module}.".startswith(f"{error.name}."):
            return f"{_installed()} has no {error.name}"
        return f"{_installed()} cannot be imported (it misses {error.name or error})"
    except Exception as error:  # a broken or foreign package may raise anything
        return f"{_installed()} cannot be imported ({type(error).__name__}: {_first_line(error)})"
    function = getattr(module, form.function, None)
    if not callable(function):
        return f"{_installed()} has no {form.function} in {form.module}"
    problem = _unsuitable(form, module, function)
    if problem:
        return problem
    return AiterKernel(form, function, frozenset(inspect.signature(function).parameters))


def _unsuitable(form: Form, module: Any, function: Callable[..., Any]) -> str | None:
    """Why a function cannot be called as its form is."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        return f"{form.function} of {_installed()} does not say what it takes ({error})"
    missing = [name for name in form.needed if name not in parameters]
    if missing:
        return f"{form.function} of {_installed()} takes no {', '.join(missing)}"
    unknown = [
        name
        for name, one in parameters.items()
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and name not in (*form.needed, *form.optional)
    ]
    if unknown:
        return f"{form.function} of {_installed()} wants {', '.join(unknown)}, which is not known here"
    by_position = [name for name in form.needed if parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY]
    if by_position:
        return f"{form.function} of {_installed()} takes {', '.join(by_position)} by position alone"
    if form is OLD and not hasattr(module, _STRIDE_FIX):
        return (
            f"{form.function} of {_installed()} is older than aiter's commit e6e7070 (2026-08-13): where pages have "
            "padding it reads from wrong places of a large cache"
        )
    return None


def _installed() -> str:
    try:
        return f"aiter {version(DISTRIBUTION)}"
    except PackageNotFoundError:  # a source tree on the path, or a package of the same name
        return f"the aiter found here (no distribution {DISTRIBUTION})"


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
