"""What a rollout engine is: the protocol that back ends implement, and the data that crosses it.

Token ids in, token ids out. Nothing here imports torch: the vLLM back end is a client of a server that has its own
environment.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.blocks.weights import Served, WeightSource

START_VERSION = -1
"""Weight version of tokens that were sampled before any weights were published: those of the model folder."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those of the distribution that was sampled from (processed)."""

    temperature: float
    """0 = greedy; then the log-probabilities reported are those at temperature 1."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends the sample; the stop token is part of the response."""


@dataclass
class Completion:
    """One sample of a group."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probability of each token of ``token_ids`` as sampled."""
    finish_reason: str
    """stop | length | abort; '' while it is under way"""
    weight_spans: list[tuple[int, int]]
    """Run-length: (weight version, number of tokens), in order, covering ``token_ids``."""

    def copy(self) -> "Completion":
        """One that does not change when this one goes on."""
        spans = list(self.weight_spans)
        return Completion(self.sample, list(self.token_ids), list(self.logprobs), self.finish_reason, spans)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Appends tokens that were sampled under one weight version."""
        if not token_ids:
            return
        self.token_ids += token_ids
        self.logprobs += logprobs
        if self.weight_spans and self.weight_spans[-1][0] == version:
            self.weight_spans[-1] = (version, self.weight_spans[-1][1] + len(token_ids))
        else:
            self.weight_spans.append((version, len(token_ids)))


@dataclass(frozen=True)
class Request:
    """One group: a prompt and the seeds of its samples (one uint64 for each sample; their number is n)."""

    group: int
    prompt_ids: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling
    begun: dict[int, Completion] = field(default_factory=dict, compare=False)
    """What samples have so far, by their place. A back end that is not ``deterministic`` goes on from there, also where
    another engine began them, and keeps it up to date while it runs. A deterministic one makes the whole batch anew."""


@dataclass
class Group:
    """A finished group: all n samples of one request, in the order of its seeds."""

    group: int
    completions: list[Completion] = field(default_factory=list)


class RolloutEngine(Protocol):
    """A loaded engine. One instance lives as long as its host; calls come from one event loop."""

    @property
    def door(self) -> str:
        """URL of the engine's own OpenAI-compatible server; '' where it has none."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Group]:
        """Yields each group once, as soon as all of its samples are finished; order is free.

        The same requests with the same weights give the same tokens where the back end says so (``deterministic``).
        Cancelling the iterator aborts what is in flight.
        """
        ...

    async def pause(self, mode: str = "keep") -> None:
        """Stops between two tokens. keep: requests stay; wait: drain first; abort: finish with reason ``abort``."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, source: WeightSource, *, deadline_s: float) -> Served:
        """Streams a published version in, drops what was derived from the old one, and says what is served now.

        With LoRA every version is an adapter, on top of the weights that the engine started with.

        deadline_s: the longest that one wait for the publisher may take.
        Raises ``headrace.engines.checkpoint.errors.WeightError`` when anything differs from the version's manifest;
        the engine then refuses to generate until a load succeeds.
        """
        ...

    async def reset_caches(self) -> None:
        """Drops keys and values that are kept for later requests."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Stops, and gives memory back where the back end can: level 1 the cache, 2 also the weights."""
        ...

    async def wake(self) -> None:
        """Undoes ``sleep``. After level 2 weights have to be loaded before the next request."""
        ...

    async def metrics(self) -> dict[str, float]:
        """What it does now: samples ``running`` and ``waiting``, ``tokens`` sampled so far. Also the health check."""
        ...

    async def served(self) -> Served | None:
        """Version and digest in use; None before the first load."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """Every setting that changes numbers: engine and version, dtype, head dtype, logprobs mode, caches, threads."""
        ...

    @property
    def deterministic(self) -> bool: ...

    async def watch(self) -> None:
        """Returns never; raises ``EngineDied`` when the engine is lost, whether or not anything runs."""
        ...

    async def close(self) -> None: ...
