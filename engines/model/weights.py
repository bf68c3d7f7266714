"""A model's weights on one rank: sharded over a gang, or whole on the one rank of a gang of one."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.engines.model.gang import Gang
from headrace.engines.model.lora import published_name
from headrace.engines.model.policy import Policy


class Weights(Protocol):
    """What is trained: master weights in float32, and the module that computes with them in another dtype."""

    module: Policy
    parameters: dict[str, nn.Parameter]
    """Masters by the name that they are published under, tied ones once. Sharded: DTensors. Frozen parameters are not
    among them: the module has those in the compute dtype."""

    def collect_gradients(self) -> None:
        """After each backward pass: adds its gradients to those of the masters."""
        ...

    def masters_changed(self) -> None:
        """After the masters were written: what was derived from them is dropped or made anew."""
        ...

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Streams the trained parameters, whole, in the compute dtype; on every rank, to the end."""
        ...


class Sharded:
    """Fully sharded data parallelism (FSDP2), layer by layer."""

    def __init__(self, module: Policy, dtype: torch.dtype, gang: Gang) -> None:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in module.layers():
            fully_shard(layer, mesh=gang.mesh, mp_policy=precision)
        fully_shard(module, mesh=gang.mesh, mp_policy=precision, reshard_after_forward=False)
        self.module = module.to(gang.device)
        self.parameters = _by_name(module)
        self._dtype = dtype

    def collect_gradients(self) -> None:
        """The backward pass has reduced them already."""

    def masters_changed(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            part = parameter.detach().to(self._dtype)
            yield name, part.full_tensor() if isinstance(part, DTensor) else part


class Alone:
    """The whole model on one rank. Sharding it over itself would copy weights and gradients several times a step."""

    def __init__(self, module: Policy, dtype: torch.dtype, gang: Gang) -> None:
        module.to(gang.device)
        named = _by_name(module)
        self.parameters = named
        if any(p.dtype != dtype for p in named.values()):
            self.parameters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in named.items()}
            for parameter in named.values():  # and not module.to(dtype), which would round buffers as well
                parameter.data = parameter.data.to(dtype)
        self.module = module
        self._compute = list(named.values())
        self._masters = list(self.parameters.values())
        self._gradients: list[Tensor] = []

    @property
    def _same(self) -> bool:
        return self._compute[0] is self._masters[0]

    def collect_gradients(self) -> None:
        if self._same:
            return
        if not self._gradients:  # kept: fresh memory would cost as much as the copy
            self._gradients = [torch.empty_like(p) for p in self._masters]
        for master, parameter, room in zip(self._masters, self._compute, self._gradients, strict=True):
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = room.copy_(parameter.grad)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def masters_changed(self) -> None:
        if not self._same:
            for master, parameter in zip(self._masters, self._compute, strict=True):
                parameter.data.copy_(master.data)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in zip(self.parameters, self._compute, strict=True):
            yield name, parameter.detach()


def _by_name(module: Policy) -> dict[str, nn.Parameter]:
    """The parameters that are trained."""
    trained = {name.removeprefix("causal."): p for name, p in module.named_parameters() if p.requires_grad}
    return {published_name(name) if ".lora_" in name else name: p for name, p in trained.items()}
