"""Which samples are computed together: rows that share a prompt, micro-batches under a token budget, ranks in balance.

Everything here is a pure function of lengths, the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engines.model.base import Samples
from headrace.engines.model.errors import BadBatch


@dataclass(frozen=True)
class Row:
    """Samples that share one prompt, which is computed once for them."""

    samples: tuple[int, ...]
    tokens: int
    """Tokens that the model computes at most: the prompt, and every response without its last token, which predicts
    nothing. What all responses begin with is computed once."""


MicroBatch = tuple[Row, ...]


def make_rows(samples: Samples, keep: Tensor, budget: int) -> list[Row]:
    """Rows of the kept samples (bool [S]) that have response tokens, each of at most ``budget`` tokens.

    A group above the budget becomes several rows, longest samples first; a single sample above it is a row of its own.
    Raises BadBatch for an empty prompt.
    """
    prompts = samples.prompt_offsets.tolist()
    lengths = samples.offsets.diff().tolist()
    ids = samples.prompt_ids.numpy()
    shared: dict[tuple[int, bytes], list[int]] = {}
    for i, (group, kept) in enumerate(zip(samples.groups.tolist(), keep.tolist(), strict=True)):
        if kept and lengths[i]:
            if prompts[i] == prompts[i + 1]:
                raise BadBatch(f"sample {i} (group {group}) has an empty prompt: its first token has nothing to follow")
            shared.setdefault((group, ids[prompts[i] : prompts[i + 1]].tobytes()), []).append(i)
    rows: list[Row] = []
    for members in shared.values():
        prompt = prompts[members[0] + 1] - prompts[members[0]]
        for part in _first_fit([(i, lengths[i] - 1) for i in members], budget - prompt):
            rows.append(Row(tuple(part), prompt + sum(lengths[i] - 1 for i in part)))
    return rows


def plan(rows: Sequence[Row], ranks: int, budget: int) -> list[list[MicroBatch]]:
    """Micro-batches of each rank, as many on every rank; missing ones are empty.

    Rows go to the least loaded rank, longest first; each rank then fills micro-batches, longest first.
    """
    loads, shares = [0] * ranks, [[] for _ in range(ranks)]
    for index in sorted(range(len(rows)), key=lambda i: (-rows[i].tokens, i)):
        rank = loads.index(min(loads))
        loads[rank] += rows[index].tokens
        shares[rank].append((index, rows[index].tokens))
    batches = [[tuple(rows[i] for i in part) for part in _first_fit(share, budget)] for share in shares]
    most = max(len(part) for part in batches)
    return [[*part, *[()] * (most - len(part))] for part in batches]


def minibatches(samples: Samples, keep: Tensor, count: int) -> list[Tensor]:
    """Splits the kept samples by whole groups, in order, into ``count`` sets of nearly equal size: bool [S] each.

    Fewer sets when there are fewer groups.
    """
    groups = list(dict.fromkeys(samples.groups[keep].tolist()))
    parts = [part.tolist() for part in np.array_split(np.array(groups, dtype=np.int64), min(count, len(groups)) or 1)]
    return [keep & torch.isin(samples.groups, torch.tensor(part, dtype=torch.int64)) for part in parts if part]


def _first_fit(items: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Bins of (index, size) under the budget, by first fit, largest first; indices ascend inside a bin."""
    bins: list[tuple[int, list[int]]] = []
    for index, size in sorted(items, key=lambda item: (-item[1], item[0])):
        place = next((n for n, (used, _) in enumerate(bins) if used + size <= budget), None)
        if place is None:
            bins.append((size, [index]))
        else:
            used, inside = bins[place]
            bins[place] = (used + size, [*inside, index])
    return [sorted(inside) for _, inside in bins]
