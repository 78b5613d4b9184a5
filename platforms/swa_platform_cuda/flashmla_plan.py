"""Tile plans: how FlashMLA's decode shares its work among multiprocessors, one for each layer type and step.

A plan is made from the lengths by the first decode that uses it. In a graph capture that happens inside the captured
call, so that every replay plans again from the lengths of its own step; each capture of one metadata object plans for
itself. A captured build that is replayed without the attention calls is one that nothing here can see: what attends to
a step has to be captured with its build, or follow a build that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from swa_backend.errors import ProviderError
from swa_backend.layer_types import LayerType
from swa_backend.row_marks import version_of


class PlanShape(NamedTuple):
    """Everything that a plan depends on besides lengths."""

    layer_type: LayerType
    batch: int
    s_q: int
    heads: int
    page_entries: int
    width: int
    extra_page_entries: int | None
    extra_width: int | None


class TilePlan:
    """An empty plan that its first decode fills.

    Attributes:
        layer_type: the layers it is for.
        filled: how often a decode has planned with it.
        shared: what the last decode with it prepared for further layers; see `flashmla_shared`.
    """

    __slots__ = ("_lens", "_when", "filled", "generation", "layer_type", "shape", "shared", "vendor")

    def __init__(self, layer_type: LayerType) -> None:
        self.layer_type = layer_type
        self.filled = 0
        self.shape: PlanShape | None = None
        self.generation = 0
        self.vendor: Any = None
        self.shared: Any = None
        self._when: object = None
        self._lens: tuple[torch.Tensor, ...] = ()

    def use(
        self,
        make: Callable[[], Any],
        shape: PlanShape,
        generation: int,
        *lens: torch.Tensor,
        version: int | None = 0,
        capture: int = 0,
    ) -> Any:
        """The vendor's plan for a decode: made by this call if it is empty, else known to fit.

        Lengths that were given in other tensors, or changed in place by torch since, are planned for anew; so is the
        first call inside each graph capture.

        Args:
            make: makes an empty plan of the vendor's.
            shape: of the decode.
            generation: of the metadata; it tells that lengths changed without reading them.
            lens: the [batch] int32 lengths, as the caller gave them, or what they follow from.
            version: counts changes of the lengths that torch does not see; None where nothing counts them: every call
                then plans anew.
            capture: number of the graph capture that the decode goes to, 0 outside.

        Raises:
            ProviderError: the plan is of another layer type, was made for other shapes, or for a step before this one.
        """
        if self.shape is None:
            if shape.layer_type is not self.layer_type:
                self._refuse("layer_type", self.layer_type, shape.layer_type)
        elif shape != self.shape:
            name, old, new = next(
                (name, old, new) for name, old, new in zip(shape._fields, self.shape, shape, strict=True) if old != new
            )
            self._refuse(name, old, new)
        elif generation != self.generation:
            self._refuse("lengths", f"those of build {self.generation}", f"those of build {generation}")
        when = (*((one.data_ptr(), version_of(one)) for one in lens), capture, version)
        if self.shape is None or version is None or when != self._when:
            self.vendor = make()  # first: if it fails, the plan stays what it was
            self.shape, self.generation, self._when = shape, generation, when
            self._lens = lens  # kept, so that no other tensor can take their addresses
            self.filled += 1
        return self.vendor

    def _refuse(self, name: str, old: object, new: object) -> None:
        raise ProviderError(
            f"plan of {self.layer_type} layers: {name}",
            found=f"a decode with {new}",
            legal=f"{old}, as the plan was made for",
            fix="Use the metadata's own plan of the layer's type, fresh with every build and update.",
        )


class FlashMLATileScheduler:
    """Fresh plans for every build; the builder asks for them only where it chose FlashMLA (so never on sm120)."""

    def fresh_plans(self, layer_types: Sequence[LayerType]) -> Mapping[LayerType, TilePlan]:
        """A new, empty plan for each layer type."""
        return {layer_type: TilePlan(layer_type) for layer_type in layer_types}
