"""What can be known to be wrong before an engine starts is said before an engine starts, all of it at once."""

import asyncio
import json
import shutil
import time
from importlib.util import find_spec
from math import prod
from pathlib import Path

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound

from headrace.blocks.fp8 import unservable
from headrace.blocks.home import home, model_folder
from headrace.blocks.recipe import Recipe
from headrace.engines import data
from headrace.engines.folder import parameter_shapes
from headrace.engines.lora import adapter_shapes, target_modules

FREE_BYTES_PER_PARAMETER_BYTE = 8
"""A checkpoint holds float32 weights and two moments; two of them may exist for a moment, beside the exported model."""


class RecipeRefused(ValueError):
    """The campaign cannot work as configured; the message lists every reason."""


def check_recipe(recipe: Recipe) -> None:
    """Model folder, chat template, data, packages, disk. Raises RecipeRefused with all that is wrong."""
    problems = [*_model_problems(recipe), *_data_problems(recipe), *_disk_problems(recipe)]
    if problems:
        raise RecipeRefused("the recipe cannot work here:\n" + "\n".join(f"- {p}" for p in problems))


async def check_workers(recipe: Recipe) -> None:
    """A worker must be online in every pool that the recipe names, within ``deadlines.worker``."""
    roles = [recipe.roles.actor, recipe.roles.rollout, *([recipe.roles.reference] if recipe.roles.reference else [])]
    pools = sorted({role.pool for role in roles})
    end = time.monotonic() + recipe.deadlines.worker
    async with get_client() as api:
        while True:
            missing = [pool for pool in pools if not await _online(api, pool)]
            if not missing:
                return
            if time.monotonic() > end:
                raise RecipeRefused(
                    "no worker is online for work pool "
                    + "; nor for ".join(f"{p} (start one: prefect worker start --pool {p})" for p in missing)
                )
            await asyncio.sleep(1.0)


async def _online(api: PrefectClient, pool: str) -> bool:
    try:
        await api.read_work_pool(pool)
    except ObjectNotFound as error:
        raise RecipeRefused(f"there is no work pool {pool}: prefect work-pool create {pool} --type process") from error
    workers = await api.read_workers_for_work_pool(pool)
    return any(worker.status == WorkerStatus.ONLINE for worker in workers)


def _model_problems(recipe: Recipe) -> list[str]:
    folder = model_folder(recipe.model.path)
    if not (folder / "config.json").is_file():
        return [
            f"model.path: no model in {folder} (no config.json). Give a Hugging Face folder; "
            f"the quickstart's: python -m headrace.deployments.smollm2 {home() / 'models' / 'smollm2-135m-instruct'}"
        ]
    problems = []
    if not list(folder.glob("*.safetensors")):
        problems.append(f"model.path: {folder} has no *.safetensors")
    elif getattr(recipe.rollout.backend, "quantization", None) and (
        why := unservable(parameter_shapes(folder), recipe.roles.rollout.gpus)
    ):
        problems.append(f"rollout.backend.quantization: {folder} cannot be served in blocks of FP8: {why}")
    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file():
        problems.append(f"model.path: {folder} has no tokenizer_config.json")
    elif not (folder / "chat_template.jinja").is_file() and not json.loads(tokenizer.read_text()).get("chat_template"):
        problems.append(
            f"model.path: the tokenizer of {folder} has no chat template: put one into chat_template.jinja there"
        )
    if recipe.model.lora is not None and not problems:
        try:
            target_modules(parameter_shapes(folder), recipe.model.lora)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _data_problems(recipe: Recipe) -> list[str]:
    try:
        splits = data.load_splits(recipe.data)
    except data.DataError as error:
        return [f"data: {error}"]
    problems = []
    if recipe.evaluate.problems > len(splits.held_out):
        problems.append(
            f"evaluate.problems is {recipe.evaluate.problems}, but {len(splits.held_out)} problems are held out"
        )
    if recipe.prompts > len(splits.train):
        problems.append(f"prompts is {recipe.prompts}, but there are only {len(splits.train)} training problems")
    if "://" in recipe.store and recipe.store.startswith("s3://") and find_spec("s3fs") is None:
        problems.append("store: s3:// needs the package s3fs: pip install 'headrace[s3]'")
    return problems


def _disk_problems(recipe: Recipe) -> list[str]:
    folder = model_folder(recipe.model.path)
    size = _trained_bytes(recipe, folder)
    home().mkdir(parents=True, exist_ok=True)
    free, need = shutil.disk_usage(home()).free, size * FREE_BYTES_PER_PARAMETER_BYTE * (recipe.checkpoint.keep + 1)
    if recipe.weights.transport == "store":
        need += size * (recipe.weights.keep + 1)
    if free < need:
        return [f"disk: {home()} has {free / 1e9:.1f} GB free, checkpoints of this model need {need / 1e9:.1f} GB"]
    return []


def _trained_bytes(recipe: Recipe, folder: Path) -> int:
    """Bytes of what is trained, as it is exported; 0 when that is not known."""
    if recipe.model.lora is None:
        return sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    try:
        shapes = parameter_shapes(folder)
        added = adapter_shapes(shapes, recipe.model.lora.rank, target_modules(shapes, recipe.model.lora))
    except ValueError:
        return 0
    return sum(prod(shape) for shape in added.values()) * (2 if recipe.model.dtype == "bfloat16" else 4)
