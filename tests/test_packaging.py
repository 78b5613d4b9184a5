"""What the wheel holds: every module, the data files of the replay, the platforms' entry points."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "swa_backend", "platforms")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is left in the source tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(target)], cwd=source, check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_file_of_the_packages_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(base))
        for base, package in ((ROOT, "swa_backend"), (ROOT / "platforms", "swa_*"))
        for folder in base.glob(package)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"swa_backend/py.typed", "swa_backend/replay/data/models/deepseek-v4-flash.json"} <= expected
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    points = ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["console_scripts"]) == {"swa-backend": "swa_backend.cli:main"}
    assert dict(points["vllm.general_plugins"]) == {"swa_backend": "swa_backend_vllm:register"}
    assert {name: value.partition(":")[0] for name, value in points["swa_backend.platforms"].items()} == {
        "cpu": "swa_platform_cpu",
        "cuda": "swa_platform_cuda",
        "rocm": "swa_platform_rocm",
    }


def test_the_core_requires_torch_alone(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert [one for one in metadata.get_all("Requires-Dist") if "extra" not in one] == ["torch>=2.9"]
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
