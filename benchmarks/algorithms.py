"""Advantage + loss + metrics, forward and backward, against verl 0.9.1: ``python -m benchmarks.algorithms``.

The same 512 × 2,048 tokens in float32 on one CPU thread, verl and Headrace in turns. Exits 1 when a bound is missed: at
least 1.5× for GRPO with PPO-clip, GSPO and CISPO, never slower for any other loss or estimator. ``--full`` makes every
answer 2,048 tokens long in place of 256 to 2,048, ``--rounds N`` sets the number of turns.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import verl_reference
from headrace.algorithms.advantages import advantages
from headrace.algorithms.batch import Jagged
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.losses.covariance import select
from headrace.algorithms.objective import finish_metrics, policy_objective
from headrace.blocks.algorithms import Algorithm

SAMPLES, WIDTH, GROUP = 512, 2048, 8
FAST = ("ppo_clip", "gspo", "cispo")
LOSSES: dict[str, tuple[str, dict]] = {
    "ppo_clip": ("vanilla", {"kind": "ppo_clip", "dual_clip": 3.0}),
    "gspo": ("gspo", {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2}),
    "cispo": ("cispo", {"kind": "cispo", "clip_low": 0.2}),
    "sapo": ("sapo", {"kind": "sapo"}),
    "gmpo": ("geo_mean", {"kind": "gmpo"}),
    "reinforce": ("gpg", {"kind": "reinforce"}),
    "dppo tv": ("dppo_tv", {"kind": "dppo", "divergence": "tv"}),
    "dppo kl": ("dppo_kl", {"kind": "dppo", "divergence": "kl"}),
    "dro": ("dro", {"kind": "dro", "beta": 0.1}),
    "clip_cov": ("clip_cov", {"kind": "clip_cov"}),
    "kl_cov": ("kl_cov", {"kind": "kl_cov"}),
}
ESTIMATORS: dict[str, tuple[str, dict]] = {
    "grpo": ("grpo", {"kind": "grpo"}),
    "rloo": ("rloo", {"kind": "rloo"}),
    "opo": ("opo", {"kind": "opo"}),
    "gpg": ("gpg", {"kind": "gpg"}),
    "grpo_passk": ("grpo_passk", {"kind": "grpo_passk"}),
    "gdpo": ("gdpo", {"kind": "gdpo"}),
    "reinforce_pp": ("reinforce_plus_plus", {"kind": "reinforce_pp"}),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", {"kind": "reinforce_pp_baseline"}),
    "remax": ("remax", {"kind": "remax"}),
    "optimal_token_baseline": ("optimal_token_baseline", {"kind": "optimal_token_baseline"}),
    "gae": ("gae", {"kind": "gae"}),
}


@dataclass
class Batch:
    """The same padded tensors for both, [samples, width]."""

    mask: torch.Tensor
    columns: dict[str, torch.Tensor]
    rewards: torch.Tensor

    @classmethod
    def make(cls, full: bool) -> "Batch":
        torch.manual_seed(0)
        lengths = torch.full((SAMPLES,), WIDTH) if full else torch.randint(WIDTH // 8, WIDTH + 1, (SAMPLES,))
        mask = torch.arange(WIDTH)[None] < lengths[:, None]
        new = -3 * torch.rand(SAMPLES, WIDTH)
        near = {name: new + 0.1 * torch.randn_like(new) for name in ("old", "values")}
        rewards = torch.rand(SAMPLES)
        token_rewards = torch.zeros_like(new)
        token_rewards[torch.arange(SAMPLES), lengths - 1] = rewards
        columns = {"new": new, **near, "sum_pi_squared": torch.rand_like(new), "token_rewards": token_rewards}
        return cls(mask, columns, rewards)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    verl_reference.prepare()
    torch.set_num_threads(1)
    batch = Batch.make(arguments.full)
    missed = 0
    print(f"{'':26}{'verl ms':>10}{'ours ms':>10}{'ratio':>8}{'bound':>8}")
    for name in [f"loss {x}" for x in LOSSES] + [f"advantage {x}" for x in ESTIMATORS]:
        section, key = name.split(" ", 1)
        bound = 1.5 if section == "loss" and key in FAST else 1.0
        job = loss_job if section == "loss" else estimator_job
        theirs, ours = compare(*job(key, batch), arguments.rounds)
        ratio = theirs / ours
        missed += ratio < bound
        print(f"{name:26}{theirs * 1e3:10.1f}{ours * 1e3:10.1f}{ratio:8.2f}{bound:8.1f}{'  MISSED' * (ratio < bound)}")
    return 1 if missed else 0


def compare(theirs: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Best CPU seconds of each (one thread, so wall time of a quiet machine), in turns, after one uncounted round."""
    seconds = {theirs: [], ours: []}
    for _ in range(rounds + 1):
        for job, taken in seconds.items():
            start = time.process_time()
            job()
            taken.append(time.process_time() - start)
    return min(seconds[theirs][1:]), min(seconds[ours][1:])


def loss_job(name: str, batch: Batch) -> tuple[Callable[[], object], Callable[[], object]]:
    """GRPO's advantage, the loss with its metrics, and the gradient."""
    from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig  # pyright: ignore[reportMissingImports]

    mode, loss = LOSSES[name]
    columns, mask = batch.columns, batch.mask
    policy = PolicyLossConfig(loss_mode=mode, dro_beta=0.1)
    settings = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy)
    uid = np.array([str(i // GROUP) for i in range(SAMPLES)], dtype=object)
    as_long = mask.long()

    def theirs() -> object:
        advantage = core_algos.get_adv_estimator_fn("grpo")
        a, _ = advantage(token_level_rewards=columns["token_rewards"], response_mask=as_long, index=uid)
        new = columns["new"].detach().requires_grad_()
        value, metrics = core_algos.get_policy_loss_fn(mode)(
            old_log_prob=columns["old"],
            log_prob=new,
            advantages=a,
            response_mask=as_long,
            loss_agg_mode="token-mean",
            config=settings,
            rollout_is_weights=None,
        )
        value.backward()
        return metrics

    aggregation = None if loss["kind"] == "gmpo" else {"kind": "token-mean"}
    config = Algorithm.model_validate({"loss": loss, "aggregation": aggregation})
    groups = torch.arange(SAMPLES) // GROUP
    flat_mask = Jagged.from_padded(mask)

    def ours() -> object:
        old = columns["old"].reshape(-1)
        result = advantages(config, rewards=batch.rewards, groups=groups, batch=flat_mask)
        selected = None
        if config.loss.kind in ("clip_cov", "kl_cov"):
            selected = select(config.loss, logprobs=old, advantages=result.values, batch=result.batch)
        new = columns["new"].reshape(-1).detach().requires_grad_()
        objective = policy_objective(
            config,
            new=new,
            old=old,
            advantages=result.values,
            batch=result.batch,
            denominators=Denominators.of(result.batch),
            selected=selected,
        )
        objective.loss.backward()
        return finish_metrics(objective.sums)

    return theirs, ours


def estimator_job(name: str, batch: Batch) -> tuple[Callable[[], object], Callable[[], object]]:
    """The advantages alone."""
    from verl.trainer.config import AlgoConfig  # pyright: ignore[reportMissingImports]
    from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]

    kind, estimator = ESTIMATORS[name]
    columns = batch.columns
    uid = np.array([str(i // GROUP) for i in range(SAMPLES)], dtype=object)
    as_long = batch.mask.long()
    options = {
        "gae": {"values": columns["values"], "gamma": 1.0, "lam": 0.95},
        "reinforce_plus_plus": {"config": AlgoConfig(gamma=1.0)},
        "remax": {"reward_baselines": batch.rewards},
    }.get(kind, {"index": uid, "config": AlgoConfig()})
    if kind == "optimal_token_baseline":
        options |= {"old_log_probs": columns["old"], "sum_pi_squared": columns["sum_pi_squared"]}

    def theirs() -> object:
        function = core_algos.get_adv_estimator_fn(kind)
        return function(token_level_rewards=columns["token_rewards"].clone(), response_mask=as_long, **options)

    config = Algorithm.model_validate({"advantage": estimator})
    flat_mask = Jagged.from_padded(batch.mask)
    inputs = {"old": columns["old"], "values": columns["values"], "sum_pi_squared": columns["sum_pi_squared"]}
    flat: dict[str, Any] = {key: x.reshape(-1) for key, x in inputs.items()}

    def ours() -> object:
        groups = torch.arange(SAMPLES) // GROUP
        return advantages(
            config, rewards=batch.rewards, groups=groups, batch=flat_mask, greedy_rewards=batch.rewards, **flat
        )

    return theirs, ours


if __name__ == "__main__":
    sys.exit(main())
