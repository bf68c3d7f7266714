"""The model engine on PyTorch's fully sharded data parallelism (FSDP2): gloo on CPUs, NCCL on GPUs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.engines.model import state, step
from headrace.engines.model.base import Experience, Samples, StepConfig, Which
from headrace.engines.model.errors import ModelEngineError
from headrace.engines.model.gang import Gang
from headrace.engines.model.optim import make_optimizer
from headrace.engines.model.packing import make_rows, plan
from headrace.engines.model.policy import Policy, load_policy
from headrace.engines.model.prefix import Packed, pack
from headrace.engines.model.spec import EngineSpec


@dataclass
class Sharded:
    """A model whose parameters are sharded over the gang."""

    module: Policy
    parameters: dict[str, nn.Parameter]
    """Shards by Hugging Face name; tied parameters once."""

    def reshard(self) -> None:
        """Drops gathered parameters: after forward passes without backward, and whenever the shards have changed."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@dataclass
class Trained(Sharded):
    """The policy with its optimizer."""

    optimizer: torch.optim.AdamW


class FSDP2Engine:
    """See ``headrace.engines.model.base.ModelEngine``. Master weights are float32, compute is in ``spec.dtype``."""

    def __init__(self, spec: EngineSpec, gang: Gang) -> None:
        self.spec, self.gang = spec, gang
        self.train_step: int | None = 0
        self.last_key = ""
        """Content key of the last train job; empty before the first."""
        self.kl_coefficient: float | None = None
        """Of an adaptive controller; None before its first update."""
        self.reference = self._shard(self._dtype, frozen=True) if spec.reference else None
        self._start()

    def _start(self) -> None:
        torch.manual_seed(self.spec.seed)
        self.policy: Trained | None = None
        if self.spec.policy:
            model = self._shard(torch.float32, frozen=False)
            self.policy = Trained(model.module, model.parameters, make_optimizer(model.parameters.values()))
        self.train_step, self.last_key, self.kl_coefficient = 0, "", None

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.spec.dtype)

    def _shard(self, dtype: torch.dtype, frozen: bool) -> Sharded:
        spec, gang = self.spec, self.gang
        head = torch.float32 if spec.head_dtype == "float32" else None
        module = load_policy(Path(spec.model), dtype, head, on_cpu=gang.device.type == "cpu").requires_grad_(not frozen)
        # The one device also holds the shards of the others: gathering again in the backward pass would only cost time.
        alone = gang.size == 1
        precision = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for layer in module.layers():
            fully_shard(layer, mesh=gang.mesh, mp_policy=precision, reshard_after_forward=not alone)
        fully_shard(module, mesh=gang.mesh, mp_policy=precision, reshard_after_forward=False)
        module.to(gang.device)
        names = {name.removeprefix("causal."): p for name, p in module.named_parameters()}
        return Sharded(module, names)

    def trained(self) -> Trained:
        """The policy. Raises ModelEngineError for an engine that has none."""
        if self.policy is None:
            raise ModelEngineError("this engine holds the reference model only: policy is false in its spec")
        return self.policy

    def frozen(self) -> Sharded:
        """The reference. Raises ModelEngineError for an engine that has none."""
        if self.reference is None:
            raise ModelEngineError("this engine holds no reference model: set reference in its spec")
        return self.reference

    def micro_batches(self, samples: Samples, keep: Tensor) -> Iterator[Packed]:
        """This rank's micro-batches of the kept samples (bool [S]); every rank gets as many."""
        budget = self.spec.tokens_per_microbatch
        mine = plan(make_rows(samples, keep, budget), self.gang.size, budget)[self.gang.rank]
        return (pack(samples, rows, self.gang.device) for rows in mine)

    def logprobs(self, samples: Samples, which: Which) -> Tensor:
        """See ``ModelEngine``."""
        model = self.trained() if which == "policy" else self.frozen()
        found = torch.zeros(samples.tokens, dtype=torch.float32, device=self.gang.device)
        with torch.no_grad():
            for packed in self.micro_batches(samples, torch.ones(len(samples), dtype=torch.bool)):
                values, _ = model.module(packed, self.spec.temperature)
                found[packed.tokens] = values[: len(packed.tokens)]
        model.reshard()
        if self.gang.size > 1:
            dist.all_reduce(found)  # every token is computed on one rank and 0 on the others
        return found.cpu()

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
        return [(name, self.spec.dtype, list(p.shape)) for name, p in self.trained().parameters.items()]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See ``ModelEngine``."""
        for name, parameter in self.trained().parameters.items():
            wire = parameter.detach().to(self._dtype)
            yield name, wire.full_tensor() if isinstance(wire, DTensor) else wire

    def save(self, path: Path, cursor: int) -> None:
        """See ``ModelEngine``."""
        state.save(self, path, cursor)

    def load(self, path: Path | None) -> int:
        """See ``ModelEngine``."""
        if path is None:
            self._start()
            return 0
        return state.load(self, path)

    def export(self, path: Path) -> None:
        """See ``ModelEngine``."""
        state.export(self, path)
