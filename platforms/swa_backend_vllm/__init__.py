"""What vLLM loads, in each of its processes, from the entry-point group ``vllm.general_plugins``.

A package of its own, because importing anything of `swa_backend` imports torch and looks at the machine: unless the
plugin is switched on, vLLM's processes pay for nothing but this file.
"""

import os

VARIABLE = "SWA_BACKEND_VLLM"


def register() -> None:
    """Replace parts of vLLM as ``SWA_BACKEND_VLLM`` says; without it, do nothing.

    Raises:
        swa_backend.ConfigError: the variable has an unknown value, or this vLLM is not one that the plugin was made
            for. Nothing has been replaced then, and vLLM does not start.
    """
    if os.environ.get(VARIABLE, "").strip():
        from swa_backend.integrations.vllm.plugin import activate

        activate(os.environ[VARIABLE])
