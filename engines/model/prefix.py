"""Shared-prefix packing: a micro-batch as one row of tokens, in which every prompt stands once for all of its samples.

    [prompt a | a1 | a2 | … | prompt b | b1 | …]

A response token sees its prompt and the earlier tokens of its own sample; its positions go on from the prompt's end.
The last token of a response predicts nothing and is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from headrace.engines.model.attention import Blocks
from headrace.engines.model.base import Samples
from headrace.engines.model.packing import MicroBatch

FLEX_BLOCK = 128
"""Rows for flex attention are padded to a multiple of its block."""


@dataclass(frozen=True)
class Packed:
    """A micro-batch on its device. L: tokens of the row; t: response tokens to predict; s: samples."""

    input_ids: Tensor
    """int64 [1, L]."""
    position_ids: Tensor
    """int64 [1, L]."""
    source: Tensor
    """int64 [t or 1]: place in the row of the hidden state that predicts each response token."""
    targets: Tensor
    """int64 [t or 1]: those response tokens."""
    tokens: Tensor
    """int64 [t]: their places in the flat response tokens of the whole batch. Empty for an empty micro-batch, whose one
    target is a stand-in, there for the collectives."""
    offsets: Tensor
    """int64 [s + 1]: samples in ``tokens``."""
    blocks: Blocks | None
    """For attention on the CPU."""
    block_mask: BlockMask | None
    """For flex attention."""


def pack(samples: Samples, rows: MicroBatch, device: torch.device) -> Packed:
    """Builds one micro-batch. Order: rows as given, samples of a row ascending."""
    ids, positions, source, targets, tokens = [], [], [], [], []
    runs: list[tuple[int, int, list[tuple[int, int]]]] = []
    lengths: list[int] = []
    place = 0
    starts, offsets = samples.prompt_offsets.tolist(), samples.offsets.tolist()
    for row in rows:
        first = row.samples[0]
        prompt = samples.prompt_ids[starts[first] : starts[first + 1]]
        begin, size = place, len(prompt)
        ids.append(prompt)
        positions.append(torch.arange(size))
        place += size
        responses = []
        for i in row.samples:
            response = samples.response_ids[offsets[i] : offsets[i + 1]]
            inputs = len(response) - 1
            ids.append(response[:-1])
            positions.append(torch.arange(size, size + inputs))
            source += [torch.tensor([begin + size - 1]), torch.arange(place, place + inputs)]
            targets.append(response)
            tokens.append(torch.arange(offsets[i], offsets[i + 1]))
            lengths.append(len(response))
            responses.append((place, inputs))
            place += inputs
        runs.append((begin, size, responses))
    if not rows:
        ids = positions = source = targets = [torch.zeros(1, dtype=torch.int64)]
        runs, place = [(0, 1, [])], 1
    on_cpu = device.type == "cpu"
    if not on_cpu and (padding := -place % FLEX_BLOCK):
        ids.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.zeros(padding, dtype=torch.int64))

    def flat(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(device, torch.int64) if parts else torch.zeros(0, dtype=torch.int64, device=device)

    return Packed(
        input_ids=flat(ids)[None],
        position_ids=flat(positions)[None],
        source=flat(source),
        targets=flat(targets),
        tokens=flat(tokens),
        offsets=torch.tensor([0, *lengths], device=device).cumsum(0),
        blocks=Blocks.of(runs) if on_cpu else None,
        block_mask=None if on_cpu else _block_mask(runs, sum(len(part) for part in ids), device),
    )


def _block_mask(runs: list[tuple[int, int, list[tuple[int, int]]]], length: int, device: torch.device) -> BlockMask:
    row, sample = segments(runs, length)
    row, sample = row.to(device), sample.to(device)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (row[q] == row[kv]) & ((sample[kv] < 0) | (sample[q] == sample[kv]))

    return create_block_mask(visible, B=None, H=None, Q_LEN=length, KV_LEN=length, device=device, BLOCK_SIZE=FLEX_BLOCK)


def segments(runs: list[tuple[int, int, list[tuple[int, int]]]], length: int) -> tuple[Tensor, Tensor]:
    """(row of each token, sample of each token with −1 for prompts), int32 [length]; padding is a row of its own."""
    row = torch.full((length,), -1, dtype=torch.int32)
    sample = torch.full((length,), -1, dtype=torch.int32)
    number = 0
    for index, (begin, size, responses) in enumerate(runs):
        row[begin : begin + size] = index
        for start, count in responses:
            row[start : start + count] = index
            sample[start : start + count] = number
            number += 1
    return row, sample
