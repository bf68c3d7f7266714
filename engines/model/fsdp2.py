"""The model engine on PyTorch's fully sharded data parallelism (FSDP2): gloo on CPUs, NCCL on GPUs."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.engines.lora import adapter_of
from headrace.engines.model import state, step
from headrace.engines.model.base import Experience, Samples, StepConfig, Which
from headrace.engines.model.errors import ModelEngineError
from headrace.engines.model.gang import Gang
from headrace.engines.model.lora import add_adapter, without_adapter
from headrace.engines.model.optim import make_optimizer
from headrace.engines.model.packing import make_rows, plan
from headrace.engines.model.parity import turn
from headrace.engines.model.policy import load_policy
from headrace.engines.model.prefix import Packed, pack
from headrace.engines.model.spec import EngineSpec
from headrace.engines.model.weights import Alone, Sharded, Weights


@dataclass
class Trained:
    """The policy with its optimizer."""

    weights: Weights
    optimizer: torch.optim.AdamW


class FSDP2Engine:
    """See ``headrace.engines.model.base.ModelEngine``. Master weights are float32, compute is in ``spec.dtype``."""

    def __init__(self, spec: EngineSpec, gang: Gang) -> None:
        self.spec, self.gang = spec, gang
        self.adapter = adapter_of(Path(spec.model), spec.lora) if spec.lora else None
        self.train_step: int | None = 0
        self.last_key = ""
        """Content key of the last train job; empty before the first."""
        self.kl_coefficient: float | None = None
        """Of an adaptive controller; None before its first update."""
        self._probed: int | None = None
        self.saving: Future[Any] | None = None
        """What is being written in the background."""
        # With LoRA the policy holds it already.
        self.reference = self._load(trained=False) if spec.reference and self.adapter is None else None
        self._start()

    def _start(self) -> None:
        torch.manual_seed(self.spec.seed)
        self.policy: Trained | None = None
        if self.spec.policy:
            weights = self._load(trained=True)
            self.policy = Trained(weights, make_optimizer(weights.parameters.values()))
        self.train_step, self.last_key, self.kl_coefficient = 0, "", None

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.spec.dtype)

    def _load(self, trained: bool) -> Weights:
        head = torch.float32 if self.spec.head_dtype == "float32" else None
        whole = trained and self.adapter is None
        dtype = torch.float32 if whole else self._dtype
        module = load_policy(Path(self.spec.model), dtype, head, on_cpu=self.gang.device.type == "cpu")
        module.requires_grad_(whole)
        if trained and self.adapter is not None:
            add_adapter(module, self.adapter, self.spec.seed)
        place = Alone if self.gang.size == 1 else Sharded
        return place(module, self._dtype, self.gang)

    def trained(self) -> Trained:
        """The policy. Raises ModelEngineError for an engine that has none."""
        if self.policy is None:
            raise ModelEngineError("this engine holds the reference model only: policy is false in its spec")
        return self.policy

    def frozen(self) -> Weights:
        """What the reference is computed with. Raises ModelEngineError for an engine that has none."""
        if not self.spec.reference:
            raise ModelEngineError("this engine holds no reference model: set reference in its spec")
        return self.reference or self.trained().weights

    def micro_batches(self, samples: Samples, keep: Tensor) -> Iterator[Packed]:
        """This rank's micro-batches of the kept samples (bool [S]); every rank gets as many."""
        budget = self.spec.tokens_per_microbatch
        mine = plan(make_rows(samples, keep, budget), self.gang.size, budget)[self.gang.rank]
        return (pack(samples, rows, self.gang.device) for rows in mine)

    def logprobs(self, samples: Samples, which: Which) -> Tensor:
        """See ``ModelEngine``."""
        return self._forward(samples, which, entropy=False)[0]

    def logprobs_and_entropies(self, samples: Samples, which: Which) -> tuple[Tensor, Tensor]:
        """See ``ModelEngine``."""
        found = self._forward(samples, which, entropy=True)
        return found[0], found[1]

    def _forward(self, samples: Samples, which: Which, entropy: bool) -> Tensor:
        """float32 [1 or 2, T]: log-probabilities, then entropies."""
        model = self.trained().weights if which == "policy" else self.frozen()
        found = torch.zeros(2 if entropy else 1, samples.tokens, dtype=torch.float32, device=self.gang.device)
        of_base = which == "reference" and self.adapter is not None
        with torch.no_grad(), without_adapter(model.module) if of_base else nullcontext():
            for packed in self.micro_batches(samples, torch.ones(len(samples), dtype=torch.bool)):
                for row, values in zip(found, model.module(packed, self.spec.temperature, entropy), strict=False):
                    row[packed.tokens] = values[: len(packed.tokens)]
        if self.gang.size > 1:
            dist.all_reduce(found)  # every token is computed on one rank and 0 on the others
        return found.cpu()

    def probe(self, on: bool) -> None:
        """See ``ModelEngine``."""
        if on == (self._probed is not None):
            return
        if on and self.train_step is None:
            raise ModelEngineError("the last step failed half-way: load saved state first")
        turn(self.trained().weights, self.adapter)
        self.train_step, self._probed = (None, self.train_step) if on else (self._probed, None)

    def train(self, experience: Experience, config: StepConfig) -> dict[str, float]:
        """See ``ModelEngine``."""
        if self.train_step is None:
            raise ModelEngineError("the last step failed half-way: load saved state first")
        began = time.perf_counter()
        experience = step.complete(self, experience, config)
        number, self.train_step = self.train_step, None
        metrics = step.train(self, experience, config, number)
        self.train_step = number + 1
        return metrics | {"seconds": time.perf_counter() - began}

    def metas(self) -> list[tuple[str, str, list[int]]]:
        """See ``ModelEngine``."""
        parameters = self.trained().weights.parameters
        return [(name, self.spec.dtype, list(p.shape)) for name, p in parameters.items()]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See ``ModelEngine``."""
        return self.trained().weights.whole()

    def save(self, path: Path, cursor: int) -> None:
        """See ``ModelEngine``."""
        state.save(self, path, cursor)

    def settle(self) -> None:
        """See ``ModelEngine``."""
        state.settle(self)

    def load(self, path: Path | None) -> int:
        """See ``ModelEngine``."""
        self._probed = None
        if path is None:
            self._start()
            return 0
        return state.load(self, path)
