"""The parity gate: before a campaign trains, rollout engine and trainer must give tokens the same probability."""

import asyncio

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import ValidationError

from headrace.blocks.manifest import Manifest
from headrace.engines.rpc.errors import EngineError, Fenced
from headrace.tasks.ablation import Knob, knobs
from headrace.tasks.campaign import current
from headrace.tasks.engines import EngineStartFailed
from headrace.tasks.parity import (
    accept,
    end_trials,
    parity_generate,
    parity_logprob,
    parity_prompts,
    parity_report,
    parity_weights,
    try_knob,
)
from headrace.tasks.recovery import SyncMismatch
from headrace.tasks.verdict import CHANGED, OWN, ParityFailed, Round, Trial, excesses, failure


@flow(name="parity-gate", flow_run_name="parity-gate", persist_result=False, validate_parameters=False)
async def parity_gate(campaign: str) -> dict[str, float]:
    """Two rounds on the same prompts: under changed weights, then under the campaign's. Raises ParityFailed.

    Two rounds, because some faults show only when weights change: an update that does not take, or a cache that
    outlives it.
    """
    c = current()
    drawn = await parity_prompts()
    rounds = await _rounds(drawn)
    if not any(excesses(c, r) for r in rounds):
        await parity_report(rounds)
        return accept(rounds)
    get_run_logger().warning("rollout engine and trainer differ too much; looking for the cause")
    changed = [r for r in rounds if r.weights == CHANGED and excesses(c, r)]
    stale = {r.engine: await parity_logprob("before", r.engine, r.generated) for r in changed}
    trials = [await _trial(knob, drawn) for knob in knobs(c.recipe)] if c.recipe.parity.ablation else []
    await parity_report(rounds, trials)
    if trials:
        await end_trials()
    raise ParityFailed(failure(c, rounds, stale, trials))


async def _rounds(drawn: Manifest, trial: str = "") -> list[Round]:
    """Every rollout engine samples; the trainer computes the same tokens again."""
    found: list[Round] = []
    for weights in (CHANGED, OWN):
        await parity_weights(weights, trial)
        found += await asyncio.gather(*(_round(weights, i, drawn, trial) for i in current().engines.rollouts()))
    return found


async def _round(weights: str, engine: int, drawn: Manifest, trial: str) -> Round:
    generated = await parity_generate(weights, engine, drawn, trial)
    return Round(weights, engine, generated, await parity_logprob(weights, engine, generated, trial))


async def _trial(knob: Knob, drawn: Manifest) -> Trial:
    """The two rounds with one setting changed; engines that do not start with it are part of the answer."""
    if knob.already:
        return Trial(knob, note="already so")
    try:
        await try_knob(knob)
        return Trial(knob, await _rounds(drawn, f"{knob.slug}/"))
    except Fenced:
        raise
    except ValidationError as error:
        return Trial(knob, note=f"does not go with this recipe: {error.errors()[0]['msg']}")
    except (EngineStartFailed, EngineError, SyncMismatch) as error:
        return Trial(knob, note=f"did not run: {str(error).splitlines()[0]}")
