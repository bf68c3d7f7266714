"""A place for TensorRT-LLM: its engine has the same shape (token ids in, token ids and log-probabilities out)."""

import subprocess
from typing import NoReturn

from headrace.engines.rollout.errors import MissingPackage, UnsupportedEngine
from headrace.engines.rollout.spec import RolloutSpec

LOOK_S = 60.0


async def start(spec: RolloutSpec) -> NoReturn:
    """Raises MissingPackage where the package is absent, UnsupportedEngine where it is there."""
    look = "from importlib.metadata import version; print(version('tensorrt_llm'))"
    found = subprocess.run([spec.python, "-c", look], capture_output=True, text=True, timeout=LOOK_S, check=False)
    if found.returncode:
        raise MissingPackage(f"{spec.python} has no tensorrt_llm; choose rollout.backend vllm or sglang")
    raise UnsupportedEngine(
        f"tensorrt_llm {found.stdout.strip()} is installed, but this version of Headrace has no back end for it: "
        "choose rollout.backend vllm or sglang"
    )
