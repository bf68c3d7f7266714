"""From a recipe to the command that starts an engine of a role. Imports no torch."""

import os
from typing import Any

from headrace.blocks.home import model_folder
from headrace.blocks.recipe import Recipe, Role
from headrace.engines.model import spec as model
from headrace.engines.rollout import spec as rollout

MAX_THREADS = 16
"""Most CPU threads that an engine takes unless the recipe says how many."""

KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""glibc keeps what a model engine on CPUs has freed. By default it gives every large tensor back to the kernel, which
clears the pages anew for the next: 5% of a training step."""


class EngineSpecError(ValueError):
    """The host's environment lacks what the recipe's engine needs."""


def command_and_spec(
    recipe: Recipe, role: str, identity: dict[str, Any], python: str
) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Command, environment and content of SPEC.json.

    Args:
        identity: role, epoch, token, endpoint (file that the engine writes its address to), log_folder.
        python: interpreter of the engine's environment.
    """
    place: Role = getattr(recipe.roles, role)
    threads = place.threads or max(1, min(MAX_THREADS, (os.cpu_count() or 1) // place.world_size))
    env = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    served = {
        "endpoint": identity["endpoint"],
        "role": role,
        "epoch": identity["epoch"],
        "token": identity["token"],
        "idle_limit_s": recipe.deadlines.idle_engine,
    }
    if role == "rollout":
        spec = rollout.ServerSpec(**served, log_dir=identity["log_folder"], rollout=_rollout(recipe, place, threads))
        return [python, "-m", "headrace.engines.rollout.server"], env, spec.model_dump(mode="json")
    engine = model.EngineSpec(
        model=str(model_folder(recipe.model.path)),
        dtype=recipe.model.dtype,
        head_dtype=recipe.model.head_dtype,
        lora=recipe.model.lora if role == "actor" else None,
        device="cuda" if place.gpus else "cpu",
        threads=threads,
        policy=role == "actor",
        reference=recipe.needs_reference and (role == "reference" or recipe.roles.reference is None),
        tokens_per_microbatch=recipe.train.tokens_per_microbatch,
        temperature=recipe.rollout.temperature,
        seed=recipe.seed,
    )
    spec = model.ServerSpec(**served, engine=engine)
    gang = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(place.world_size), "-m"]
    program = [*(gang if place.world_size > 1 else []), "headrace.engines.model.server"]
    return [python, "-m", *program], env | ({} if place.gpus else KEEP_MEMORY), spec.model_dump(mode="json")


def _rollout(recipe: Recipe, place: Role, threads: int) -> rollout.RolloutSpec:
    kind = recipe.rollout.backend.kind
    python = ""
    if kind != "transformers":
        variable = f"HEADRACE_{kind.upper()}_PYTHON"
        python = os.environ.get(variable, "")
        if not os.path.isfile(python):
            raise EngineSpecError(
                f"the {kind} back end needs the interpreter of an environment that has it: set {variable} in the "
                f"job variables of work pool {place.pool} (now {python or 'not set'})"
                + ("; `make vllm-env` makes one for CPUs" if kind == "vllm" else "")
            )
    return rollout.RolloutSpec(
        model=str(model_folder(recipe.model.path)),
        dtype=recipe.model.dtype,
        head_dtype=recipe.model.head_dtype,
        lora=recipe.model.lora,
        gpus=place.gpus,
        threads=threads,
        python=python,
        backend=recipe.rollout.backend,
    )
