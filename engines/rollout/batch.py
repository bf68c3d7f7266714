"""Continuous batching: which samples are live, which start next, which have finished. One call of ``generate``."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.engines.rollout.base import Completion, Group, Request
from headrace.engines.rollout.counter import uniform
from headrace.engines.rollout.decoder import Decoder
from headrace.engines.rollout.sampler import draw
from headrace.engines.rollout.slots import PromptCache, Storage

LENGTH_STEP = 16
"""Slots, and the part of them that a step reads, are multiples of this long: few shapes for the kernels."""


@dataclass
class _Pending:
    """A request under way. The prompt's cache is kept until all of its samples have started."""

    request: Request
    waiting: deque[int]
    """Samples that have no slot yet."""
    completions: list[Completion | None]
    cache: PromptCache | None = None
    hidden: torch.Tensor | None = None
    """[hidden] of the prompt's last token."""


@dataclass
class _Row:
    """Live samples of a group that have said the same so far: computed once. A row's slot is its place in the list."""

    pending: _Pending
    samples: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def request(self) -> Request:
        return self.pending.request

    @property
    def cached(self) -> int:
        """Tokens in the slot: all but the newest, whose key and value the next step makes."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def split(self, tokens: Sequence[int]) -> list["_Row"]:
        """One row for each of the tokens that the samples drew, in the order of their first samples."""
        drawn: dict[int, list[int]] = {}
        for sample, token in zip(self.samples, tokens, strict=True):
            drawn.setdefault(token, []).append(sample)
        return [
            _Row(self.pending, samples, [*self.token_ids], [*self.logprobs], [*self.spans])
            for samples in drawn.values()
        ]

    def add(self, token: int, logprob: float, version: int) -> str:
        """Appends a token and says why the samples end: stop, length, or '' when they go on."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))
        if token in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.sampling.max_tokens else ""


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class Batch:
    """The state of one call. Its steps, and so every rounding in it, depend on the requests only.

    Args:
        version: weight version that new tokens carry.
        prefill_tokens: prompts are computed together up to this many tokens.
    """

    def __init__(
        self, decoder: Decoder, storage: Storage, requests: Sequence[Request], *, version: int, prefill_tokens: int
    ) -> None:
        self.version = version
        self.tokens = 0
        """Sampled so far."""
        self._decoder, self._prefill_tokens, self._capacity = decoder, prefill_tokens, storage.max_batch
        longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        self._slots = storage.slots(_round_up(longest))
        self._queue = deque(_Pending(r, deque(range(len(r.seeds))), [None] * len(r.seeds)) for r in requests)
        self._rows: list[_Row] = []
        self._finished: list[Group] = []

    @property
    def _live(self) -> int:
        return sum(len(row.samples) for row in self._rows)

    @property
    def done(self) -> bool:
        return not self._rows and not self._queue

    def take(self) -> list[Group]:
        """Groups that finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def step(self) -> None:
        """One token for every live sample; then free places are given to the next samples."""
        if self._rows:
            positions = [row.cached for row in self._rows]
            device = self._decoder.device
            logits = self._decoder.decode(
                torch.tensor([row.token_ids[-1] for row in self._rows], device=device),
                torch.tensor(positions, device=device),
                self._slots,
                _round_up(max(positions) + 1),
            )
            self._sample(logits, 0)
        while self._queue and self._live < self._capacity:
            self._start()

    def refresh(self, version: int) -> None:
        """After new weights: recomputes the caches of everything under way, so that no old key or value is used."""
        self.version = version
        for pending in self._queue:
            pending.cache = pending.hidden = None
        sequences = [[*row.request.prompt_ids, *row.token_ids[:-1]] for row in self._rows]
        for chunk in self._chunks([len(s) for s in sequences]):
            _, caches = self._decoder.prefill([sequences[i] for i in chunk])
            for slot, cache in zip(chunk, caches, strict=True):
                self._slots.fill(slot, cache)

    def abort(self) -> None:
        """Ends everything under way; samples that never started have no tokens."""
        for row in self._rows:
            self._close(row, "abort")
        for pending in self._queue:
            for sample in pending.waiting:
                self._close(_Row(pending, [sample]), "abort")
        self._rows.clear()
        self._queue.clear()

    def _start(self) -> None:
        """Gives free places to waiting samples, in order, and draws their first tokens from the prompts' logits.

        As many samples live at a time as there are slots, so that each has one when all say different things.
        """
        first, live = len(self._rows), self._live
        while self._queue and live < self._capacity:
            pending = self._queue[0]
            samples = [pending.waiting.popleft() for _ in range(min(len(pending.waiting), self._capacity - live))]
            self._rows.append(_Row(pending, samples))
            live += len(samples)
            if not pending.waiting:
                self._queue.popleft()
        prompts = self._prompts([row.pending for row in self._rows[first:]])
        for slot, (_, cache) in enumerate(prompts, first):
            self._slots.fill(slot, cache)
        self._sample(self._decoder.logits(torch.stack([hidden for hidden, _ in prompts])), first)

    def _prompts(self, chosen: list[_Pending]) -> list[tuple[torch.Tensor, PromptCache]]:
        """Last hidden state and cache of each, computed where they are not known yet."""
        new = [pending for pending in chosen if pending.cache is None]
        for chunk in self._chunks([len(pending.request.prompt_ids) for pending in new]):
            hidden, caches = self._decoder.prefill([new[i].request.prompt_ids for i in chunk])
            for index, state, cache in zip(chunk, hidden, caches, strict=True):
                new[index].hidden, new[index].cache = state, cache
        return [(p.hidden, p.cache) for p in chosen if p.hidden is not None and p.cache is not None]

    def _chunks(self, lengths: list[int]) -> list[list[int]]:
        """Indices in order, cut where a chunk would exceed the token budget."""
        chunks: list[list[int]] = []
        used = 0
        for index, length in enumerate(lengths):
            if not chunks or used + length > self._prefill_tokens:
                chunks.append([])
                used = 0
            chunks[-1].append(index)
            used += length
        return chunks

    @torch.inference_mode()
    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """Draws a token for every sample of the rows from ``first`` on. Rows part where their samples differ, and go
        where they end."""
        rows = self._rows[first:]
        device = logits.device
        drawing = [(row, index, sample) for index, row in enumerate(rows) for sample in row.samples]
        numbers = uniform(
            np.array([row.request.seeds[sample] for row, _, sample in drawing], np.uint64),
            np.array([len(row.token_ids) for row, _, _ in drawing], np.uint64),
        )
        if len(drawing) > len(rows):
            logits = logits[torch.tensor([index for _, index, _ in drawing], device=device)]
        tokens, logprobs = draw(
            logits,
            torch.tensor([row.request.sampling.temperature for row, _, _ in drawing], device=device),
            torch.from_numpy(numbers).to(device),
        )
        drawn = iter(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        ended = []
        for slot, row in enumerate(rows, first):
            mine = [next(drawn) for _ in row.samples]
            known = dict(mine)
            parts = row.split([token for token, _ in mine])
            cached = row.cached + 1
            for number, (token, part) in enumerate(zip(known, parts, strict=True)):
                place = slot if number == 0 else len(self._rows)
                if number == 0:
                    self._rows[slot] = part
                else:
                    self._slots.move(slot, place, cached)
                    self._rows.append(part)
                reason = part.add(token, known[token], self.version)
                if reason:
                    self._close(part, reason)
                    ended.append(place)
        self.tokens += len(drawing)
        for slot in sorted(
            ended, reverse=True
        ):  # the last row moves into the hole; descending, so that it is a live one
            last = self._rows.pop()
            if slot < len(self._rows):
                self._slots.move(len(self._rows), slot, last.cached)
                self._rows[slot] = last

    def _close(self, row: _Row, reason: str) -> None:
        completions = row.pending.completions
        for sample in row.samples:
            completions[sample] = Completion(sample, [*row.token_ids], [*row.logprobs], reason, [*row.spans])
        if None not in completions:
            self._finished.append(Group(row.request.group, [c for c in completions if c is not None]))
