"""How a model engine is started: what its host writes into SPEC.json. Imports no torch."""

from typing import Literal

from pydantic import Field, model_validator

from headrace.blocks.base import Strict
from headrace.blocks.recipe import Lora


class EngineSpec(Strict):
    """One model engine; every rank of its gang reads the same."""

    model: str
    """Hugging Face folder: config, tokenizer, and the weights of version 0, which are the reference model's too."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype and wire dtype; master weights, gradients and optimizer state are float32."""
    head_dtype: Literal["model", "float32"] = "model"
    """Of the language-model head: float32 multiplies the (rounded) weights in float32, as a rollout engine does."""
    lora: Lora | None = None
    """The policy is the model with such an adapter, and only that is trained and sent; the model itself is frozen, in
    the compute dtype, and is the reference. Left out, all weights are trained."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank."""
    policy: bool = True
    """Holds the model that is trained; false = an engine for the reference model alone."""
    reference: bool = False
    """Holds a frozen copy of the start model, in the compute dtype."""
    tokens_per_microbatch: int = Field(default=4096, ge=1)
    """Token budget of one forward and backward pass on one rank."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling: all log-probabilities are of softmax(logits / temperature)."""
    seed: int = 0
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """The longest that one rank waits for another inside a step."""

    @model_validator(mode="after")
    def _has_a_model(self) -> "EngineSpec":
        if not (self.policy or self.reference):
            raise ValueError("policy and reference are both false: the engine would hold no model")
        if self.lora is not None and not self.policy:
            raise ValueError("lora has no effect with policy: false; remove it")
        return self


class ServerSpec(Strict):
    """The whole SPEC.json of ``python -m headrace.engines.model.server``."""

    endpoint: str
    """File to write ``{"url", "pid", "epoch"}`` to when the engine is ready."""
    role: str = "actor"
    epoch: int
    """Number of this engine process among those that held the role."""
    token: str
    """The campaign's token: every request carries it."""
    host: str = "127.0.0.1"
    port: int = 0
    idle_limit_s: float = Field(default=900.0, gt=0)
    """Leave after so many seconds without a request."""
    engine: EngineSpec
