"""Experience in Arrow as the tensors of a model engine, and its results as columns of the schema."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headrace.blocks.manifest import Manifest
from headrace.engines.experience import schema
from headrace.engines.experience.store import Store
from headrace.engines.experience.tensors import column_to_jagged, join_columns
from headrace.engines.model.base import Samples
from headrace.engines.model.errors import BadBatch

GENERATED = ["uid", "group_id", "prompt_ids", "response_ids", "response_mask", "behaviour_logprobs"]
"""Columns of stage generate that a model engine reads."""


def read(store: Store, generated: Sequence[Manifest], *others: Sequence[Manifest]) -> pa.Table:
    """The samples of all shards in order, joined by uid with the columns of the other stages that were given."""
    table = _concat(store, generated).select(GENERATED)
    return join_columns(table, *(_concat(store, shards) for shards in others if shards))


def _concat(store: Store, manifests: Sequence[Manifest]) -> pa.Table:
    parts = [m.part for m in manifests]
    if not parts or None in parts:
        empty = [f"{m.stage}[{m.step}/{m.shard}]" for m in manifests if m.part is None]
        raise BadBatch(f"there is no table to read: {', '.join(empty) or 'no manifest was given'}")
    return pa.concat_tables([store.read_table(part) for part in parts if part is not None])


def samples_of(table: pa.Table) -> Samples:
    """Prompts, responses and groups; aliases the table's memory where it can."""
    prompts, prompt_offsets = column_to_jagged(table, "prompt_ids")
    responses, offsets = column_to_jagged(table, "response_ids")
    groups = torch.from_numpy(table["group_id"].to_numpy().copy())
    return Samples(groups, prompts, prompt_offsets, responses, offsets)


def tokens_of(table: pa.Table, name: str, samples: Samples) -> Tensor | None:
    """A column over response tokens, [T]; None where the table has none. Raises BadBatch when its lengths differ."""
    if name not in table.column_names:
        return None
    values, offsets = column_to_jagged(table, name)
    if not torch.equal(offsets, samples.offsets):
        row = int((offsets.diff() != samples.offsets.diff()).nonzero()[0])
        wanted, found = int(samples.offsets.diff()[row]), int(offsets.diff()[row])
        raise BadBatch(f"sample {table['uid'][row]} has {wanted} response tokens, but {found} of {name}")
    return values


def lists_of(values: Tensor, offsets: Tensor) -> pa.ListArray:
    """float32 [T] as a column of lists."""
    flat = pa.array(values.to(torch.float32).numpy())
    return pa.ListArray.from_arrays(pa.array(offsets.to(torch.int32).numpy()), flat, type=schema.floats)


def rewards_of(table: pa.Table) -> tuple[Tensor, dict[str, Tensor]]:
    """(rewards float64 [S], NaN where scoring failed; named parts, likewise)."""
    rewards = table["reward"].combine_chunks().fill_null(float("nan")).to_numpy(zero_copy_only=False)
    rows = [dict(row) if row else {} for row in table["reward_parts"].to_pylist()]
    names = sorted({name for row in rows for name in row})
    parts = {name: torch.tensor([row.get(name, float("nan")) for row in rows], dtype=torch.float64) for name in names}
    return torch.from_numpy(rewards.astype(np.float64)), parts
