"""How a rollout engine is started: what its host writes into SPEC.json. Imports no torch."""

from typing import Literal

from pydantic import Field, model_validator

from headrace.blocks.base import Strict
from headrace.blocks.recipe import Backend, Lora


class RolloutSpec(Strict):
    """One rollout engine."""

    model: str
    """Hugging Face folder: config, tokenizer and the weights that the engine starts with."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights, activations and key-value cache; published weights must come in it."""
    head_dtype: Literal["model", "float32"] = "model"
    """Of the output head."""
    lora: Lora | None = None
    """Every version is such an adapter of the model; left out, it is a whole model."""
    gpus: int = Field(0, ge=0)
    """GPUs of this engine; 0 = CPU."""
    threads: int = Field(1, ge=1)
    """CPU threads."""
    python: str = ""
    """Interpreter of the engine's own environment; not for the transformers back end, which runs in this one."""
    backend: Backend

    @model_validator(mode="after")
    def _one_environment(self) -> "RolloutSpec":
        if (self.backend.kind != "transformers") != bool(self.python):
            raise ValueError(f"python names the environment of vllm, sglang or trtllm; backend is {self.backend.kind}")
        if self.backend.kind == "transformers" and self.gpus > 1:
            raise ValueError(f"gpus is {self.gpus}, but the transformers back end uses at most one: choose vllm")
        if self.lora is not None and self.backend.kind == "transformers":
            raise ValueError("the transformers back end serves no LoRA adapters: choose vllm or sglang")
        return self


class ServerSpec(Strict):
    """The whole SPEC.json of ``python -m headrace.engines.rollout.server``."""

    endpoint: str
    """File to write ``{"url", "pid", "epoch"}`` to when the engine is ready."""
    log_dir: str
    """Folder for the logs of child processes."""
    role: str = "rollout"
    epoch: int
    """Number of this engine process among those that held the role."""
    token: str
    """The campaign's token; calls without it are refused."""
    host: str = "127.0.0.1"
    port: int = 0
    idle_limit_s: float = Field(900.0, gt=0)
    """Leave after so many seconds without a request."""
    rollout: RolloutSpec
