"""Trainer state on disk: sharded, atomic, written in the background, readable by a gang of another size."""

import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException

from headrace.engines.model.errors import BadState

if TYPE_CHECKING:
    from headrace.engines.model.fsdp2 import FSDP2Engine

COMPLETE = "COMPLETE"
"""Marker file of a whole folder, and what is not a tensor: step, cursor, key of the last train job."""
FORMAT = 1


_writer = ThreadPoolExecutor(1, thread_name_prefix="trainer-state")


def save(engine: "FSDP2Engine", path: Path, cursor: int) -> None:
    """Copies the state and returns; threads write it into a temporary folder beside ``path``, put the marker in last,
    and rename. ``settle`` waits for that; so does the next ``save`` or ``load``.

    A complete state is never replaced, so there is no moment without one: saved again, it stays as it is. Raises
    BadState where ``path`` holds another step's.
    """
    settle(engine)
    temporary = path.with_name(f".{path.name}.tmp")
    first = engine.gang.rank == 0
    there = json.loads((path / COMPLETE).read_text()) if first and (path / COMPLETE).is_file() else None
    if engine.gang.agree(there is not None):
        if there and (there["train_step"], there["last_key"]) != (engine.train_step, engine.last_key):
            raise BadState(
                f"{path} holds the state of step {there['train_step']} of another run already: nothing was saved. Give "
                "another folder, or delete that one"
            )
        return
    if first:
        for stale in path.parent.glob(".*.tmp"):  # of trainers that were killed
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    facts = {
        "format": FORMAT,
        "train_step": engine.train_step,
        "last_key": engine.last_key,
        "kl_coefficient": engine.kl_coefficient,
        "cursor": cursor,
        "adapter": engine.adapter and engine.adapter.model_dump(mode="json"),
        "parameters": {name: list(p.shape) for name, p in engine.trained().weights.parameters.items()},
    }
    group = engine.gang.saving
    written = saver.async_save(_tensors(engine), checkpoint_id=temporary, process_group=group)
    assert isinstance(written, Future)
    # Rank 0 hears of the end of every rank's writing before its own ends.
    engine.saving = _writer.submit(_complete, written, facts, temporary, path) if first else written


def settle(engine: "FSDP2Engine") -> None:
    """Returns when nothing is being written any more, on every rank. Raises BadState when it could not be written."""
    saving, engine.saving = engine.saving, None
    if saving is None:
        return
    try:
        saving.result(engine.spec.collective_timeout_s)
    except (OSError, RuntimeError, CheckpointException) as error:
        why = str(error) or f"it was not written within {engine.spec.collective_timeout_s:g} s"
        raise BadState(
            f"the trainer's state could not be saved; what was saved before is untouched: {why}. Look at the "
            "disk, then run the campaign again"
        ) from error
    dist.barrier()


def _complete(written: "Future[object]", facts: dict[str, Any], temporary: Path, path: Path) -> None:
    written.result()
    _write_synced(temporary / COMPLETE, json.dumps(facts).encode())
    _place(temporary, path)


def load(engine: "FSDP2Engine", path: Path) -> int:
    """Restores everything that ``save`` wrote; returns the data cursor. Raises BadState before anything has changed."""
    settle(engine)
    marker = path / COMPLETE
    if not marker.is_file():
        raise BadState(f"{path} holds no complete trainer state: there is no file {COMPLETE} in it")
    facts = json.loads(marker.read_text())
    if facts["format"] != FORMAT:
        raise BadState(f"{path} has format {facts['format']}; this version reads format {FORMAT}")
    if facts["parameters"] != {name: list(p.shape) for name, p in engine.trained().weights.parameters.items()}:
        raise BadState(f"{path} is the state of another model: its parameters are not those of {engine.spec.model}")
    if facts.get("adapter") != (engine.adapter and engine.adapter.model_dump(mode="json")):
        raise BadState(
            f"{path} is the state of another LoRA adapter or base: {facts.get('adapter')}, not {engine.adapter}"
        )
    engine.train_step = None
    tensors = _tensors(engine)
    loader.load(tensors, checkpoint_id=path)
    engine.trained().weights.masters_changed()
    torch.set_rng_state(tensors["random"])
    engine.train_step, engine.last_key = facts["train_step"], facts["last_key"]
    engine.kl_coefficient = facts["kl_coefficient"]
    return facts["cursor"]


def _tensors(engine: "FSDP2Engine") -> dict[str, Any]:
    """The tensors that make up the state, to be written or to be read into. Missing optimizer state is created."""
    policy = engine.trained()
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in policy.weights.parameters.items():
        state = policy.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=engine.gang.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        moments[name] = {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq")}
    parameters = {name: p.detach() for name, p in policy.weights.parameters.items()}
    return {"model": parameters, "optimizer": moments, "random": torch.get_rng_state()}


def _place(temporary: Path, path: Path) -> None:
    """One rename: at any moment the state is whole under its name, or not there."""
    _sync(temporary)
    if not (path / COMPLETE).is_file():
        shutil.rmtree(path, ignore_errors=True)  # what is left of a deletion that was interrupted
    temporary.rename(path)  # fails where there is a complete one
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
