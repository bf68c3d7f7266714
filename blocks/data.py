"""Which problems a campaign trains on, and which it only measures itself on (held out)."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.blocks.base import Strict


class Sums(Strict):
    """Sums asked in plain words: "What is 23 + 41? Answer with only the number."

    The held-out sums are in the training set in neither order of their two numbers.
    """

    kind: Literal["sums"] = "sums"
    low: Annotated[int, Field(ge=0)] = 10
    """Smallest number."""
    high: Annotated[int, Field(ge=0, le=999)] = 49
    """Largest number; both ends are included."""
    held_out: Annotated[int, Field(ge=1)] = 256
    """Sums kept away from training. The standard error of an accuracy over 256 is about 0.03."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Chooses which sums are held out."""

    @model_validator(mode="after")
    def _some_are_left(self) -> "Sums":
        pairs = (self.high - self.low + 1) ** 2
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        if self.held_out + 1 >= pairs:
            raise ValueError(f"held_out is {self.held_out}, but {self.low}..{self.high} gives only {pairs} sums")
        return self


class ReasoningGym(Strict):
    """A task of the reasoning-gym package: generated problems with a verifier (reward function `reasoning_gym`)."""

    kind: Literal["reasoning_gym"]
    task: str
    """Name of the task, such as chain_sum, gcd, countdown."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task, such as min_terms; what is left out has reasoning-gym's default."""
    instruction: str = ""
    """Text put on a line of its own after each question, such as the form that the answer must have."""
    size: Annotated[int, Field(ge=1, le=500_000)] = 2000
    """Problems generated for training; doubles and those that are held out are then left out."""
    held_out: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Distinct problems kept away from training."""
    seed: Annotated[int, Field(ge=0, le=4000)] = 0
    """Two seeds share no generator state."""

    @model_validator(mode="after")
    def _config_is_the_tasks(self) -> "ReasoningGym":
        for name in ("seed", "size"):
            if name in self.config:
                raise ValueError(f"config.{name} has no effect here: set `{name}` beside `task`")
        return self


class Jsonl(Strict):
    """A file of JSON lines: `prompt` (text) or `messages` (chat), `ground_truth`, and `id` where there is one."""

    kind: Literal["jsonl"]
    path: str
    """A file or any fsspec URL; .gz, .bz2 and .xz are unpacked."""
    held_out: Annotated[int, Field(ge=1)] | str
    """How many rows of the file are kept away from training, or the path of a second file that is."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Chooses which rows are held out."""

    @model_validator(mode="after")
    def _seed_is_used(self) -> "Jsonl":
        if isinstance(self.held_out, str) and self.seed:
            raise ValueError("seed has no effect where held_out is a file")
        return self


class Plugin(Strict):
    """A data set that an installed package offers under the entry-point group `headrace.datasets`."""

    kind: Literal["plugin"]
    name: str
    """Name of the entry point."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the entry point's function."""


DataSpec = Annotated[Sums | ReasoningGym | Jsonl | Plugin, Field(discriminator="kind")]
