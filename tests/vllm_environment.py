"""Install vLLM from the index into an environment of its own and run the plugin's tests in it: the row ``vllm``.

It takes about six minutes and 9.4 GB the first time; the environment is kept in the temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = "0.33.0"
TESTS = [f"tests/test_vllm_{name}.py" for name in ("real", "plugin", "builder", "attention")]


def main() -> int:
    folder = Path(tempfile.gettempdir()) / "swa_backend_ci" / f"vllm-{VERSION}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"vllm=={VERSION}", "pytest>=8", "numpy"], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    subprocess.run([str(python), "-c", "import vllm; print('vLLM', vllm.__version__)"], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SWA_BACKEND_", "VLLM_"))}
    command = [str(python), "-m", "pytest", *TESTS, "-p", "no:cacheprovider", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
