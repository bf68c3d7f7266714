"""Prompts: data sets, their splits, and the order in which a campaign draws them."""

import inspect
from functools import lru_cache
from importlib.metadata import entry_points

from pydantic import TypeAdapter

from headrace.blocks.data import DataSpec, Jsonl, Plugin, ReasoningGym, Sums
from headrace.engines.data.base import DataError, Dataset, Problem, Splits, draw, first, prompts_table
from headrace.engines.data.jsonl import jsonl
from headrace.engines.data.reasoning_gym import reasoning_gym
from headrace.engines.data.sums import sums

GROUP = "headrace.datasets"


def load_splits(spec: DataSpec) -> Splits:
    """Opens a data set: its training and its held-out half. Opened once in a process for equal specs.

    Raises:
        DataError: a file, a row, a task or a package that cannot be used; the message says what to do.
    """
    return _load(TypeAdapter(DataSpec).dump_json(spec))


@lru_cache(maxsize=4)
def _load(document: bytes) -> Splits:
    spec = TypeAdapter(DataSpec).validate_json(document)
    match spec:
        case Sums():
            splits = sums(spec)
        case ReasoningGym():
            splits = reasoning_gym(spec)
        case Jsonl():
            splits = jsonl(spec)
        case Plugin():
            splits = _plugin(spec)
    for half, dataset in zip(splits._fields, splits, strict=True):
        if not len(dataset):
            raise DataError(f"data set {dataset.name}: the {half} half is empty")
    return splits


def _plugin(spec: Plugin) -> Splits:
    found = entry_points(group=GROUP)
    if spec.name not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise DataError(f"no installed package offers the data set {spec.name!r} ({GROUP}; found: {known})")
    function = found[spec.name].load()
    try:
        inspect.signature(function).bind(**spec.options)
    except TypeError as error:
        raise DataError(f"{GROUP} {spec.name!r} does not take these options: {error}") from error
    splits = function(**spec.options)
    if not isinstance(splits, Splits):
        raise DataError(
            f"{GROUP} {spec.name!r} returned {type(splits).__name__}; it must return Splits(train, held_out)"
        )
    return splits


__all__ = ["DataError", "Dataset", "Problem", "Splits", "draw", "first", "load_splits", "prompts_table"]
