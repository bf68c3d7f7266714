"""What `headrace doctor` looks at."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from headrace.blocks.home import home, model_folder
from headrace.deployments import stack

GB = 1e9


def all_checks() -> Iterator[tuple[str, bool, str]]:
    """(name, whether it is good, what was found or what to do)."""
    yield "python", sys.version_info >= (3, 11), f"{sys.version.split()[0]} at {sys.executable}"
    for package, extra in (("torch", "cpu"), ("transformers", "cpu"), ("tensordict", "cpu")):
        try:
            yield package, True, version(package)
        except PackageNotFoundError:
            yield package, False, f"not installed: pip install 'headrace[{extra}]' (in the environment of the engines)"
    state = stack.read_state()
    yield "stack", bool(state), f"{state['phase']}, {state['ui']}" if state else "not running: headrace up"
    if not state:
        yield (
            "port 4200",
            stack.port_is_free(4200),
            "free" if stack.port_is_free(4200) else "taken: headrace up --port 4201",
        )
    folder = model_folder("smollm2-135m-instruct")
    there = (folder / "config.json").exists()
    yield "model", there, str(folder) if there else f"missing: python -m headrace.deployments.smollm2 {folder}"
    home().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home()).free
    yield "disk", free > 5 * GB, f"{free / GB:.0f} GB free in {home()} (the quickstart needs 5)"
    python = os.environ.get("HEADRACE_VLLM_PYTHON", "")
    yield (
        "vllm environment",
        True,
        python or "none (HEADRACE_VLLM_PYTHON is not set; only needed for the vllm back end)",
    )
