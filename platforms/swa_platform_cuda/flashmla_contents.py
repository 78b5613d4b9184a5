"""What a compiled FlashMLA holds, read from its file without running any of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SM90 = ("90",)
SM100 = ("100", "103")
ARCHS = (*SM90, *SM100)

_V4, _V41, _V41_FP4 = "fp8_ds_mla", "fp8_ds_mla_v41", "fp4_ds_mla_v41"


@dataclass(frozen=True, slots=True)
class Contents:
    """What the text and the symbols of a compiled library say is in it."""

    v4_rows: bool
    v41_rows: bool
    sm90_decode: bool
    sm100_decode: bool
    small_prefill_heads: bool
    namespaces: frozenset[str]

    @classmethod
    def of(cls, path: Path, namespaces: Iterable[str] = ()) -> Contents:
        """Look through a file; no code of it runs. Raises OSError, or ValueError for an empty file."""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:

            def has(*texts: str) -> bool:
                return any(data.find(text.encode()) >= 0 for text in texts)

            v41 = has("ModelType::V41]", "ModelType::V41_FP4]")
            sm90 = has("4sm906decode6sparse", "4sm906decode10sparse_fp8")
            return cls(
                # Builds that know V4.1 name every format they dispatch on; older ones know V4 alone.
                v4_rows=has("ModelType::V4]", "ModelType::MODEL1]") or (sm90 and not v41),
                v41_rows=v41,
                sm90_decode=sm90,
                sm100_decode=has("5sm1006decode"),
                small_prefill_heads=has("launch_small_heads"),
                namespaces=frozenset(one for one in namespaces if has(one)),
            )

    def pairs(self, arch: str) -> frozenset[tuple[str, str]]:
        """(window, compressed) layouts that the decode kernel for a chip reads."""
        found: set[tuple[str, str]] = set()
        if arch in SM90 and self.sm90_decode and self.v4_rows:
            found.add((_V4, _V4))
        if arch in SM100 and self.sm100_decode:
            found |= {(_V4, _V4)} if self.v4_rows else set()
            found |= {(_V41, _V41), (_V41, _V41_FP4)} if self.v41_rows else set()
        return frozenset(found)

    def reasons(self, arch: str) -> tuple[str, ...]:
        """Why a chip cannot be served at all; empty when it can."""
        if self.pairs(arch):
            return ()
        if self.v41_rows and not self.v4_rows and not self.sm90_decode:
            return (
                "an upstream build from 2026-09-30 or later: it reads V4.1 rows (528 and 288 bytes) on sm100 alone, "
                f"neither the 584-byte V4 cache nor anything on sm{arch}",
            )
        return (f"it holds no sparse decode kernel for sm{arch}",)
