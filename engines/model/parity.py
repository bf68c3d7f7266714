"""What the parity gate asks of a model engine: its recompute compared in detail, and other weights for a while."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headrace.algorithms import parity
from headrace.algorithms.batch import Jagged
from headrace.blocks.algorithms import Algorithm
from headrace.blocks.weights import Adapter
from headrace.engines.model import columns
from headrace.engines.model.base import Samples
from headrace.engines.model.weights import Weights

PROBE_BIT = 1 << 20
"""Bit of a float32 that the probe turns: 1/8 of the leading digit, so it is there in bfloat16 as well."""
FEWEST_PAIRS = 6
"""Fewer pairs say nothing about the precision of logits."""
CLASSES = ("special", "whitespace", "digit", "letter", "punctuation", "mixed", "bytes")


def turn(weights: Weights, adapter: Adapter | None) -> None:
    """Changes every weight by 6 to 12 % of its size, up or down; done again, the weights are the same bits as before.

    It takes no memory: one bit of each float32 mantissa is turned. In an adapter's matrix B, which is zero at first,
    it is all bits of a number, with which the adapter changes what its layers give by about as much.
    """
    in_b = _bits(math.sqrt(adapter.rank) / adapter.alpha) if adapter else 0
    for name, parameter in weights.parameters.items():
        value = parameter.detach()
        local = value.to_local() if isinstance(value, DTensor) else value
        local.view(torch.int32).bitwise_xor_(in_b if ".lora_B." in name else PROBE_BIT)
    weights.masters_changed()


def _bits(value: float) -> int:
    """Of the float32 that is the power of two next to ``value``."""
    return (127 + round(math.log2(value))) << 23


def compared(
    algorithm: Algorithm,
    table: pa.Table,
    samples: Samples,
    old: Tensor,
    entropies: Tensor,
    temperature: float,
    model: Path,
) -> tuple[dict[str, float], dict[str, Any]]:
    """(metrics, tables for people) of old/behaviour on the tokens that the policy wrote.

    Metrics beside those of ``algorithms.parity.compare``: ``old/entropy`` (mean of the trainer's distributions),
    ``behaviour/entropy`` (estimated by −log-probability of what was sampled: engines give no more),
    ``behaviour/bfloat16_share`` and ``old/bfloat16_share`` over ``fork_pairs`` pairs. Tables: ``positions`` and
    ``classes`` (rows of ``by_label``), ``histogram``.
    """
    mask, behaviour = (columns.tokens_of(table, name, samples) for name in ("response_mask", "behaviour_logprobs"))
    assert mask is not None and behaviour is not None
    batch = Jagged(samples.offsets, mask.bool())
    given = {"old": old, "behaviour": behaviour, "batch": batch}
    metrics = parity.compare(algorithm.loss, **given)
    written = batch.gather(behaviour)
    if len(written):
        metrics["old/entropy"] = float(batch.gather(entropies).mean())
        metrics["behaviour/entropy"] = -float(written.mean())
    pairs = parity.fork_gaps(samples.groups, samples.response_ids, batch)
    metrics["fork_pairs"] = float(len(pairs[0]))
    if len(pairs[0]) >= FEWEST_PAIRS:
        for name, logprobs in (("behaviour", behaviour), ("old", old)):
            metrics[f"{name}/bfloat16_share"] = parity.bfloat16_share(logprobs, pairs, temperature)
    places = parity.by_label(parity.positions(batch), **given)
    kinds = parity.by_label(classes(samples.response_ids, model), **given)
    tables = {
        "positions": [{"from": 1 << k >> 1, **row} for k, row in places.items()],
        "classes": [{"class": CLASSES[k], **row} for k, row in kinds.items()],
        "histogram": parity.histogram(**given),
    }
    return metrics, tables


def classes(ids: Tensor, model: Path) -> Tensor:
    """Index into ``CLASSES`` of each token, int64 [T]: what its text is made of, by the tokenizer of ``model``.

    bytes: a part of a character; mixed: letters with digits, or words with punctuation.
    """
    tokenizer = _tokenizer(model)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    known, places = ids.unique(return_inverse=True)
    found = [0 if token in special else CLASSES.index(_class(tokenizer, token)) for token in known.tolist()]
    return torch.tensor(found, dtype=torch.int64)[places]


def _class(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if "�" in text:
        return "bytes"
    bare = text.strip()
    if not bare:
        return "whitespace"
    if bare.isdigit():
        return "digit"
    if bare.isalpha():
        return "letter"
    return "mixed" if any(c.isalnum() for c in bare) else "punctuation"


@cache
def _tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model, local_files_only=True)
