"""What the parity gate found, and the one message that says so."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.blocks.manifest import Manifest
from headrace.blocks.parity import Excess, bounds_of, exceeded
from headrace.tasks.ablation import Knob
from headrace.tasks.campaign import Campaign

CHANGED, OWN = "changed", "own"
"""Weights of the two rounds: every weight a little changed, then the campaign's again."""


class ParityFailed(RuntimeError):
    """Rollout engine and trainer differ by more than the recipe allows. Nothing was trained."""


@dataclass(frozen=True)
class Round:
    """What one rollout engine sampled under one set of weights, compared with the trainer."""

    weights: str
    engine: int
    generated: Manifest
    compared: Manifest

    @property
    def metrics(self) -> dict[str, float]:
        return self.compared.metrics

    @property
    def tables(self) -> dict[str, Any]:
        """Rows by position and token class, histogram: see ``engines.model.parity.compared``."""
        return self.compared.info["parity"]


@dataclass(frozen=True)
class Trial:
    """The rounds of the engines with one setting changed; none where they did not run (``note`` says why)."""

    knob: Knob
    rounds: Sequence[Round] = ()
    note: str = ""


def excesses(c: Campaign, found: Round) -> list[Excess]:
    """The recipe's bounds that a round passes."""
    model = c.recipe.model
    return exceeded(found.metrics, bounds_of(c.recipe.parity.bounds, model.dtype), model.head_dtype)


def failure(c: Campaign, rounds: Sequence[Round], stale: Mapping[int, Manifest], trials: Sequence[Trial]) -> str:
    """One message for people: what differs, by how much, and where to look.

    stale: by engine, its samples under the changed weights compared with a trainer that has the campaign's.
    """
    wrong = [(r, found) for r in rounds if (found := excesses(c, r))]
    lines = [
        f"rollout-{r.engine} and the trainer give the same tokens other probabilities. Under "
        f"{'changed weights' if r.weights == CHANGED else 'the weights of the campaign'}: "
        f"{'; '.join(map(str, found))} ({r.metrics['tokens']:.0f} tokens)."
        for r, found in wrong
    ]
    lines += _history(c, [r for r, _ in wrong], stale)
    holds = [t for t in trials if t.rounds and not any(excesses(c, r) for r in t.rounds)]
    if holds:
        lines += [f"Look at {t.knob.setting}: with {t.knob.name} = {t.knob.value} every bound holds." for t in holds]
    elif trials:
        lines += [_nearest(rounds, trials)]
    lines += [
        f"Nothing was trained. Tables and picture: artifacts {c.id}-parity… of the Prefect UI; what each figure means: "
        f"docs/correctness.md. Bounds are set by parity.bounds of the recipe."
    ]
    return "\n".join(lines)


def _history(c: Campaign, wrong: Sequence[Round], stale: Mapping[int, Manifest]) -> list[str]:
    """What the two rounds tell about weight updates."""
    lines = []
    for r in wrong:
        before = stale.get(r.engine)
        if r.weights == CHANGED and before is not None and not excesses(c, Round(OWN, r.engine, r.generated, before)):
            lines.append(
                f"rollout-{r.engine} samples from the weights before the update: its tokens fit those (KL "
                f"{before.metrics['mismatch/kl_k3']:.2g} against {r.metrics['mismatch/kl_k3']:.2g}). The engine says "
                f"that it loaded what was published; look at how its back end loads weights "
                f"({r.generated.info.get('fingerprint', {}).get('engine', 'engine unknown')})."
            )
    if wrong and all(r.weights == OWN for r in wrong):
        lines.append(
            "It began with the second update of the weights: something computed with earlier weights is still in use, "
            "such as a prefix cache that is not reset."
        )
    return lines


def _nearest(rounds: Sequence[Round], trials: Sequence[Trial]) -> str:
    def worst(found: Sequence[Round]) -> float:
        return max(r.metrics.get("mismatch/kl_k3", math.inf) for r in found)

    ran = sorted((t for t in trials if t.rounds), key=lambda t: worst(t.rounds))
    if not ran:
        return "No setting could be tried."
    best = ran[0]
    return (
        f"No single setting repairs it. Nearest: {best.knob.name} = {best.knob.value} with KL {worst(best.rounds):.2g} "
        f"(now {worst(rounds):.2g})."
    )
