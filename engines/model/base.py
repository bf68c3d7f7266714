"""What a model engine is: the protocol that back ends implement, and the data that crosses it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from headrace.algorithms.batch import Jagged
from headrace.blocks.algorithms import Algorithm
from headrace.blocks.recipe import Optim
from headrace.blocks.weights import Adapter

Which = Literal["policy", "reference"]


@dataclass(frozen=True)
class Samples:
    """S sampled trajectories as flat tensors on the CPU. T: response tokens of all samples, P: prompt tokens."""

    groups: Tensor
    """int64 [S]: samples of one group share a prompt."""
    prompt_ids: Tensor
    """int [P]."""
    prompt_offsets: Tensor
    """int64 [S + 1]."""
    response_ids: Tensor
    """int [T]."""
    offsets: Tensor
    """int64 [S + 1]: sample i owns the response tokens ``offsets[i]:offsets[i + 1]``."""

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.response_ids)


@dataclass(frozen=True)
class Experience:
    """The global batch of one iteration. Token tensors are float32 [T], log-probabilities in nats."""

    samples: Samples
    mask: Tensor
    """bool [T]: tokens that the policy wrote, of accepted samples. No other token is trained on."""
    advantages: Tensor
    behaviour: Tensor | None = None
    """Log-probabilities as sampled."""
    old: Tensor | None = None
    """The trainer's own at the start of the iteration. None: those of the same forward pass where one
    minibatch needs no more, else the engine computes them first."""
    reference: Tensor | None = None

    @property
    def jagged(self) -> Jagged:
        return Jagged(self.samples.offsets, self.mask)


@dataclass(frozen=True)
class StepConfig:
    """How one iteration is trained."""

    algorithm: Algorithm
    optim: Optim
    minibatches: int = 1
    """Optimizer updates, over disjoint sets of groups."""
    total_steps: int = 1
    """Iterations of the whole campaign: the schedule's length."""
    on_policy_bound: float | None = 0.1
    """Largest mean |log(new/old)| (nats) that the first of several minibatches may show; None = not checked."""


class ModelEngine(Protocol):
    """A loaded model on all ranks of a gang. Every method is called on all ranks, equal arguments, one order."""

    train_step: int | None
    """Iterations trained. None after a step that failed half-way (only ``load`` helps), and under a probe."""
    adapter: Adapter | None
    """With LoRA what is trained: it is what ``metas``, ``named_tensors``, ``save`` and ``export`` are about."""

    def logprobs(self, samples: Samples, which: Which) -> Tensor:
        """Log-probability of every response token under the policy or the reference, float32 [T] on every rank."""
        ...

    def logprobs_and_entropies(self, samples: Samples, which: Which) -> tuple[Tensor, Tensor]:
        """The same, and the entropy (nats) of the distribution of every response token; one pass."""
        ...

    def probe(self, on: bool) -> None:
        """Makes every weight another, or the same bits as before again; doing either twice changes nothing.

        For the parity gate, which sees by it whether rollout engines really load what they are sent. Meanwhile
        ``train_step`` is None: nothing can be trained or saved.
        """
        ...

    def train(self, experience: Experience, config: StepConfig) -> dict[str, float]:
        """One iteration: ``minibatches`` optimizer updates. Returns its metrics, equal on every rank.

        A gradient that is not finite skips its update and keeps the weights; ``updates/skipped`` counts it.
        """
        ...

    def metas(self) -> list[tuple[str, str, list[int]]]:
        """(Hugging Face name, dtype name, shape) of every trained parameter, in the order of ``named_tensors``."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Streams the trained parameters, whole, in the wire dtype, one at a time; every rank has to read the iterator
        to its end."""
        ...

    def save(self, path: Path, cursor: int) -> None:
        """Copies model, optimizer, step, random state and data cursor, and writes them in the background; the folder
        appears complete or not at all."""
        ...

    def settle(self) -> None:
        """Waits until what was saved is written. Raises BadState when it could not be."""
        ...

    def load(self, path: Path | None) -> int:
        """Restores saved state, or the start model for None. Returns the data cursor. Raises BadState."""
        ...
