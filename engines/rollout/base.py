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


@dataclass(frozen=True)
class Request:
    """One group: a prompt and the seeds of its samples (one uint64 for each sample; their number is n)."""

    group: int
    prompt_ids: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling


@dataclass
class Completion:
    """One sample of a group."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probability of each token of ``token_ids`` as sampled."""
    finish_reason: str
    """stop | length | abort"""
    weight_spans: list[tuple[int, int]]
    """Run-length: (weight version, number of tokens), in order, covering ``token_ids``."""


@dataclass
class Group:
    """A finished group: all n samples of one request, in the order of its seeds."""

    group: int
    completions: list[Completion] = field(default_factory=list)


class RolloutEngine(Protocol):
    """A loaded engine. One instance lives as long as its host; calls come from one event loop."""

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

        deadline_s: the longest that one wait for the publisher may take.
        Raises ``headrace.engines.checkpoint.errors.WeightError`` when anything differs from the version's manifest;
        the engine then refuses to generate until a load succeeds.
        """
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
