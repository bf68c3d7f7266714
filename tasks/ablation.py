"""Which settings may be to blame when rollout engine and trainer differ, and the recipe with one of them changed."""

from dataclasses import dataclass
from typing import Any

from headrace.blocks.inheritance import assignments, flatten, merge
from headrace.blocks.recipe import Recipe

SAFE: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "enable_chunked_prefill": False,
    "batch_invariant": True,
    "deterministic": True,
    "step_graphs": False,
    "enforce_eager": True,
}
"""Settings of back ends that may change numbers, as long as they have them, and the value above suspicion."""
ON_GPUS = ("async_scheduling", "enable_chunked_prefill", "batch_invariant")
"""vLLM has them on GPUs only."""


@dataclass(frozen=True)
class Knob:
    """One setting, the value that is above suspicion, and whose engines are started with it."""

    setting: str
    """Dotted path in the recipe."""
    value: Any
    roles: tuple[str, ...] = ("rollout",)
    now: Any = None
    """Value in force."""

    @property
    def already(self) -> bool:
        """There is nothing to try."""
        return self.value == self.now

    @property
    def name(self) -> str:
        """For people: the setting, and the side if it is not both's."""
        sides = {"rollout": " (rollout engine)", "actor": " (trainer)"}
        one_sided = self.setting.startswith("model.") and len(self.roles) == 1
        return self.setting.rpartition(".")[2] + (sides[self.roles[0]] if one_sided else "")

    @property
    def slug(self) -> str:
        """Name of its folder in the store."""
        return f"{self.setting.rpartition('.')[2]}-{'-'.join(self.roles)}".replace("_", "-")

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with this setting changed. Raises pydantic.ValidationError where they do not go together."""
        change = assignments([f"{self.setting}={self.value}"])
        return Recipe.model_validate(merge(recipe.model_dump(mode="json"), change))


def knobs(recipe: Recipe) -> list[Knob]:
    """Those that the recipe's back end has, in the order in which repairs are to be tried: what is reported, then how
    it is computed, then its precision."""
    backend = recipe.rollout.backend
    gpus = bool(recipe.roles.rollout.gpus)
    settings: list[tuple[str, Any, tuple[str, ...]]] = [
        (f"rollout.backend.{name}", value, ("rollout",))
        for name, value in SAFE.items()
        if name in type(backend).model_fields and (gpus or name not in ON_GPUS)
    ]
    if recipe.model.dtype != "float32":
        other = "model" if recipe.model.head_dtype == "float32" else "float32"
        settings += [("model.head_dtype", other, ("rollout",)), ("model.head_dtype", other, ("actor",))]
    settings += [("model.dtype", "float32", ("actor", "rollout"))]
    now = flatten(recipe.model_dump(mode="json"))
    # What is left out is on, where it is possible at all.
    return [Knob(s, value, roles, True if now[s] is None else now[s]) for s, value, roles in settings]
