"""The objects that vLLM's attention reads: of vLLM's own class, filled from this library's build.

A builder hands its object out before the builds of a batch are launched together (see `shared_step`), and most steps
of an engine replay a graph that looks at none. Until its first read an object is of a class that has no fields: the
read launches what was not launched yet, puts the fields together, and changes the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from swa_backend.integrations.vllm.shared_step import SharedBatch

OURS = "swa_backend"
"""Attribute of a filled object that holds this library's own metadata of the step."""

MADE_BY = "swa_backend_builds"
"""Attribute of a filled object: the builds that made it, and this library's metadata of their main group."""

_PENDING = "swa_backend_pending"


class MetadataClasses(NamedTuple):
    """Both derived from one metadata class of vLLM's, and told from it by nothing that vLLM looks at."""

    pending: type
    filled: type


@cache
def metadata_classes(base: type) -> MetadataClasses:
    """Derive them.

    Args:
        base: vLLM's dataclass.
    """

    def get_prefill_chunk_plan(
        self: Any, compress_ratio: int, prefill_chunk_size: int, has_compressed: bool | None = None
    ) -> Sequence[tuple[int, int, int, int]]:
        ours = vars(self).get(OURS)
        if ours is None:  # a copy that vLLM made field by field
            plan: Any = base.get_prefill_chunk_plan(  # type: ignore[attr-defined]
                self, compress_ratio, prefill_chunk_size, has_compressed
            )
        else:
            plan = ours.get_prefill_chunk_plan(compress_ratio, prefill_chunk_size, has_compressed)
        found: Sequence[tuple[int, int, int, int]] = plan
        return found

    def read_early(self: Any, name: str) -> Any:
        if name != "__class__":
            pending = object.__getattribute__(self, "__dict__").pop(_PENDING, None)
            if pending is not None:
                batch, group = pending
                _fill(self, filled, batch.builders[group].fields_of(batch, group))
        return object.__getattribute__(self, name)

    names = {"__module__": __name__, "get_prefill_chunk_plan": get_prefill_chunk_plan}
    filled = type(base.__name__, (base,), names)
    pending = type(base.__name__, (base,), {"__module__": __name__, "__getattribute__": read_early})
    return MetadataClasses(pending, filled)


def new_pending(pending_cls: type, batch: SharedBatch, group: int) -> Any:
    """An object without fields that takes those of a group of a batch when any is read."""
    made: Any = object.__new__(pending_cls)
    object.__setattr__(made, _PENDING, (batch, group))
    return made


def _fill(made: Any, filled_cls: type, values: dict[str, Any]) -> None:
    """Give a pending object its fields; what vLLM set meanwhile stays."""
    earlier: dict[str, Any] = object.__getattribute__(made, "__dict__")
    made.__class__ = filled_cls
    made.__dict__ = {**values, **earlier}
