"""What a sample is worth: which reward functions score it, with which weights, within which deadline."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from headrace.blocks.base import Strict


class RewardPart(Strict):
    """One reward function of a weighted sum."""

    function: str
    """A built-in (last_number, exact, contains, matches, reasoning_gym) or an entry point of `headrace.rewards`."""
    weight: float = 1.0
    """Factor of its value in the reward; negative makes it a penalty."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _counts(self) -> "RewardPart":
        if self.weight == 0 or not abs(self.weight) < float("inf"):
            raise ValueError(f"weight {self.weight} has no use: leave the part out, or give it a finite weight")
        return self


class RewardSpec(Strict):
    """The reward: either one `function`, or several named `parts` whose weighted sum it is."""

    function: str = ""
    """A built-in (last_number, exact, contains, matches, reasoning_gym) or an entry point of `headrace.rewards`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`."""
    parts: dict[str, RewardPart] = Field(default_factory=dict)
    """Named parts; each is also a metric of its own."""
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds that the scoring of one sample may take, all parts together; then its process is killed."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Scoring processes; each scores one sample at a time."""

    @model_validator(mode="after")
    def _one_form(self) -> "RewardSpec":
        if self.function and self.parts:
            raise ValueError("give either `function` or `parts`, not both")
        if not self.function and not self.parts:
            raise ValueError("no reward: give `function` (one) or `parts` (a weighted sum)")
        if self.options and self.parts:
            raise ValueError("`options` has no effect beside `parts`: put it into the part")
        return self

    def named(self) -> dict[str, RewardPart]:
        """The parts by name; a single function is the only part, under its own name."""
        return self.parts or {self.function: RewardPart(function=self.function, options=self.options)}
