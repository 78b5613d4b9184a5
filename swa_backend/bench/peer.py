"""The peer to measure against: a folder that holds another implementation behind a module ``peer``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from swa_backend.errors import ConfigError


def load_peer(folder: Path) -> ModuleType:
    """Import ``peer`` from a folder.

    Raises:
        ConfigError: the folder has no ``peer.py``.
    """
    if not (folder / "peer.py").is_file():
        raise ConfigError(
            "peer",
            found=str(folder),
            legal="a folder with a module peer.py (make_builder, common_metadata and the peer's kernels by name)",
            fix="Lay the peer out first, or leave --peer away to time this library alone.",
        )
    sys.path.insert(0, str(folder))
    return importlib.import_module("peer")
