"""Shared-prefix packing: a micro-batch as one row of tokens, in which every prompt stands once for all of its samples.

    [what all prompts begin with | rest of prompt a | a1 | a2 | … | rest of prompt b | b1 | …]

What all responses of a prompt begin with counts as part of the prompt. A token sees what it follows: the shared
beginning, its prompt, the earlier tokens of its own sample; positions go on. The last token of a response predicts
nothing and is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from headrace.engines.model.attention import Blocks, Layout
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
    """int64 [u]: place in the row of the hidden state that predicts each response token; what responses share, once."""
    targets: Tensor
    """int64 [u]: those response tokens."""
    expand: Tensor
    """int64 [t or 1]: which of them each response token of each sample is."""
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
    starts, offsets = samples.prompt_offsets.tolist(), samples.offsets.tolist()
    prompts = [samples.prompt_ids[starts[row.samples[0]] : starts[row.samples[0] + 1]] for row in rows]
    shared = common_prefix(prompts)
    ids = [prompts[0][:shared]] if rows else []
    positions = [torch.arange(shared)]
    source, targets, expand, tokens = [], [], [], []
    predicted = 0
    layout = Layout(shared, [])
    lengths: list[int] = []
    place = shared
    for row, prompt in zip(rows, prompts, strict=True):
        answers = [samples.response_ids[offsets[i] : offsets[i + 1]] for i in row.samples]
        said = common_prefix(answers)
        begin, size = place, len(prompt) - shared + said
        ids += [prompt[shared:], answers[0][:said]]
        positions.append(torch.arange(shared, len(prompt) + said))
        place += size
        source.append(torch.arange(place - 1 - said, place - 1))
        targets.append(answers[0][:said])
        of_all = torch.arange(predicted, predicted + said)
        predicted += said
        responses = []
        for i, answer in zip(row.samples, answers, strict=True):
            own, inputs = answer[said:], len(answer) - said - 1
            ids.append(own[:-1])
            positions.append(torch.arange(len(prompt) + said, len(prompt) + said + inputs))
            source += [torch.tensor([begin + size - 1]), torch.arange(place, place + inputs)]
            targets.append(own)
            expand += [of_all, torch.arange(predicted, predicted + len(own))]
            predicted += len(own)
            tokens.append(torch.arange(offsets[i], offsets[i + 1]))
            lengths.append(len(answer))
            responses.append((place, inputs))
            place += inputs
        layout.runs.append((begin, size, responses))
    if not rows:
        ids = positions = source = targets = expand = [torch.zeros(1, dtype=torch.int64)]
        layout, place = Layout(0, [(0, 1, [])]), 1
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
        expand=flat(expand),
        tokens=flat(tokens),
        offsets=torch.tensor([0, *lengths], device=device).cumsum(0),
        blocks=Blocks.of(layout) if on_cpu else None,
        block_mask=None if on_cpu else _block_mask(layout, sum(len(part) for part in ids), device),
    )


def common_prefix(sequences: Sequence[Tensor]) -> int:
    """Tokens that all begin with; each keeps at least one of its own, and a single sequence shares none."""
    if len(sequences) < 2:
        return 0
    width = min(len(sequence) for sequence in sequences) - 1
    heads = torch.stack([sequence[:width] for sequence in sequences])
    return int((heads == heads[0]).all(0).long().cumprod(0).sum())


def _block_mask(layout: Layout, length: int, device: torch.device) -> BlockMask:
    visible = mask_of(layout, length, device)
    return create_block_mask(visible, B=None, H=None, Q_LEN=length, KV_LEN=length, device=device, BLOCK_SIZE=FLEX_BLOCK)


def mask_of(layout: Layout, length: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Flex attention's mask function (batch, head, query, key) → bool for a row padded to ``length``."""
    # Number of each token's prompt and sample; −1: of all prompts, of all samples of the prompt, −2: padding.
    prompt = torch.full((length,), -2, dtype=torch.int32)
    sample = torch.full((length,), -1, dtype=torch.int32)
    prompt[: layout.shared] = -1
    number = 0
    for index, (begin, size, responses) in enumerate(layout.runs):
        prompt[begin : begin + size] = index
        for start, count in responses:
            prompt[start : start + count] = index
            sample[start : start + count] = number
            number += 1
    prompt, sample = prompt.to(device), sample.to(device)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = (prompt[q] == prompt[kv]) & ((sample[kv] == -1) | (sample[q] == sample[kv]))
        return (q >= kv) & ((prompt[kv] == -1) | own)

    return visible
