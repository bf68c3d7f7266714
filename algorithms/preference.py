"""Preference losses on pairs of samples, and the pairs that groups give online."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headrace.algorithms.batch import Segments
from headrace.algorithms.sums import Sums


@dataclass(frozen=True)
class PairTerms:
    """``values`` [P]: the loss of each pair; ``slope`` [S]: its derivative by each token's log-probability."""

    values: Tensor
    slope: Tensor
    sums: Sums


def dpo(config: Any, *, new: Tensor, reference: Tensor | None, pairs: Tensor, segments: Segments) -> PairTerms:
    """Direct preference optimisation (Rafailov et al., 2023, arXiv 2305.18290) on trained tokens [N].

    h = (log new − log reference) of the chosen minus that of the rejected sample (``pairs`` int64 [P, 2]).
    sigmoid: −(1 − ε) log σ(βh) − ε log σ(−βh). ipo (Azar et al., 2023, arXiv 2310.12036): (h̄ − 1/(2β))², h̄ with means
    over tokens in place of sums.
    """
    change = new if reference is None else new - reference
    reward = segments.mean(change) if config.form == "ipo" else segments.sum(change)
    chosen, rejected = pairs.unbind(1)
    margin = reward[chosen] - reward[rejected]
    if config.form == "ipo":
        distance = margin - 1 / (2 * config.beta)
        values, by_margin = distance.square(), 2 * distance
    else:
        scaled, smooth = config.beta * margin, config.label_smoothing
        values = -(1 - smooth) * logsigmoid(scaled) - smooth * logsigmoid(-scaled)
        by_margin = config.beta * (torch.sigmoid(scaled) - (1 - smooth))
    slope = torch.zeros_like(reward).index_add(0, chosen, by_margin).index_add(0, rejected, -by_margin)
    if config.form == "ipo":
        slope = slope / segments.lengths.clamp(min=1)
    return PairTerms(values, slope, _pair_sums(config, reward, margin, pairs))


def _pair_sums(config: Any, reward: Tensor, margin: Tensor, pairs: Tensor) -> Sums:
    scaled = config.beta * reward
    return Sums(
        totals={
            "dpo/pairs": torch.tensor(float(len(pairs)), dtype=torch.float64, device=reward.device),
            "dpo/accuracy": (margin > 0).sum().double(),
            "dpo/chosen_reward": scaled[pairs[:, 0]].sum().double(),
            "dpo/rejected_reward": scaled[pairs[:, 1]].sum().double(),
        }
    )


def best_worst_pairs(rewards: Tensor, groups: Tensor, accepted: Tensor) -> Tensor:
    """int64 [P, 2]: of every group with unequal rewards, its (best, worst) accepted sample; ties go to the first.

    ``rewards`` [S], ``groups`` int64 [S], ``accepted`` bool [S]; a NaN reward is never chosen.
    """
    usable = (accepted & ~rewards.isnan()).nonzero().squeeze(1)
    if not len(usable):
        return usable.new_zeros(0, 2)
    by_reward = usable[rewards[usable].sort(stable=True).indices]
    order = by_reward[groups[by_reward].sort(stable=True).indices]
    _, sizes = groups[order].unique_consecutive(return_counts=True)
    ends = sizes.cumsum(0) - 1
    worst = order[ends - sizes + 1]
    top = rewards[order[ends]]
    first_best = [order[e - s + 1 : e + 1] for e, s in zip(ends.tolist(), sizes.tolist(), strict=True)]
    best = torch.stack([run[rewards[run] == peak][0] for run, peak in zip(first_best, top, strict=True)])
    pairs = torch.stack([best, worst], 1)
    return pairs[rewards[best] > rewards[worst]]
