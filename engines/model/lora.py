"""LoRA on the policy: PEFT's layers around the frozen linear layers of the model.

PEFT is imported where it is used: most trainers have no adapter.
"""

from contextlib import AbstractContextManager

import torch

from headrace.blocks.weights import Adapter
from headrace.engines.model.policy import Policy


def add_adapter(policy: Policy, adapter: Adapter, seed: int) -> None:
    """Freezes the model and adds the adapter in float32: A random by the seed, B zero, so that nothing changes yet."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.target_modules))
    policy.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, policy.causal)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def without_adapter(policy: Policy) -> AbstractContextManager[None]:
    """Meanwhile the policy computes what the base does."""
    from peft.helpers import rescale_adapter_scale

    return rescale_adapter_scale(policy, 0.0)


def published_name(name: str) -> str:
    """Name in PEFT's files of an adapter's parameter in a transformers model."""
    return f"base_model.model.{name.replace('.default.', '.')}"
