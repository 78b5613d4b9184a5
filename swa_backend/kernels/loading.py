"""The door to the Triton kernels for platform packages: opened late, with a reason when it does not open."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swa_backend.errors import ProviderError

if TYPE_CHECKING:
    from swa_backend.operations import Operations


def load_operations(extra: str) -> Operations:
    """The shared kernels as a platform's operations.

    Args:
        extra: name of the optional dependencies that bring Triton for the platform.

    Raises:
        ProviderError: Triton is missing or cannot be imported.
    """
    _require_triton(extra)
    from swa_backend.kernels.operations import TritonOperations

    return TritonOperations()


def load_warmup(extra: str) -> Callable[..., Any]:
    """``warmup(backend, config, **options)`` of the shared kernels; raises as `load_operations`."""
    _require_triton(extra)
    from swa_backend.kernels.warmup import warmup

    return warmup


def _require_triton(extra: str) -> None:
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken package may raise anything
        raise ProviderError(
            "triton",
            found=f"{type(error).__name__}: {error}",
            legal="Triton 3.6 or later",
            fix=f"Run: pip install 'swa-backend[{extra}]'",
        ) from error
