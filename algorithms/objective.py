"""The loss of a micro-batch, as its share of the global loss, with metrics that add up."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms import diagnostics
from headrace.algorithms.aggregation import token_weights, weighted_sum
from headrace.algorithms.attach import attach
from headrace.algorithms.batch import Jagged
from headrace.algorithms.corrections import bounded, log_importance, normaliser
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.inputs import Inputs
from headrace.algorithms.kl import kl_estimate
from headrace.algorithms.losses import resolve
from headrace.algorithms.parity import mismatch_clips
from headrace.algorithms.preference import dpo
from headrace.algorithms.sums import Sums, finish_metrics, total
from headrace.algorithms.tokens import LossTerms, Tokens

__all__ = ["Objective", "finish_metrics", "policy_objective"]


@dataclass(frozen=True)
class Objective:
    """A micro-batch's share of the global batch: shares add up, over micro-batches and ranks."""

    loss: Tensor
    """Scalar; call ``backward`` on it. The sum over micro-batches is the loss of the global batch."""
    sums: Sums
    """Merge over micro-batches, all-reduce over ranks, then ``finish_metrics`` once."""


@dataclass
class _Share:
    """A part of the loss, with its derivative by the log-probabilities of the trained tokens [N]."""

    loss: Tensor
    slope: Tensor


def policy_objective(
    config: Any,
    *,
    new: Tensor,
    batch: Jagged,
    denominators: Denominators,
    old: Tensor | None = None,
    advantages: Tensor | None = None,
    behaviour: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    selected: Tensor | None = None,
    pairs: Tensor | None = None,
    kl_coefficient: float | None = None,
) -> Objective:
    """Loss and metrics of one micro-batch.

    ``config``: ``headrace.blocks.algorithms.Algorithm``. Token tensors are float [T] over ``batch``, log-probabilities
    in nats. ``new`` carries the gradient; ``entropy`` (of each token's distribution) does where its coefficient is not
    0; all others are constants. ``old`` and ``advantages`` are needed by all losses but DPO, which needs ``pairs``
    (int64 [P, 2]: chosen and rejected sample of this micro-batch). ``behaviour`` adds the mismatch metrics, and is
    needed by ``correction.importance``. ``reference`` adds the KL metrics, and is needed by ``kl`` of kind loss.
    ``selected``: bool [T] of the covariance losses. ``kl_coefficient``: in place of the configured one.

    A trained token with an input that is not finite counts in ``nonfinite_tokens`` and adds nothing to loss or
    gradient. No trained token at all: loss 0, gradient 0. Raises ``AlgorithmError`` for a missing input or a wrong
    shape.
    """
    x = Inputs.of(
        batch,
        new=new,
        old=old,
        advantages=advantages,
        behaviour=behaviour,
        reference=reference,
        entropy=entropy,
        selected=selected,
    )
    sums = Sums(totals=diagnostics.counts(x.segments) | {"nonfinite_tokens": x.bad_count()})
    if config.loss.kind == "dpo":
        share = _pairs(config.loss, x, pairs, denominators, sums)
    else:
        share = _policy(config, x, denominators, sums)
        _add_kl(config, x, share, denominators, kl_coefficient, sums)
    loss = attach(new, share.loss, share.slope, batch)
    loss = _with_entropy(config, x, loss, entropy, batch, denominators, sums)
    return Objective(loss, sums)


def _policy(config: Any, x: Inputs, denominators: Denominators, sums: Sums) -> _Share:
    """The policy loss with its importance weights."""
    user = f"loss '{config.loss.kind}'"
    new, old, advantages = (x.need(name, user) for name in ("new", "old", "advantages"))
    function, settings = resolve(config.loss)
    by_autograd = config.loss.kind == "plugin"
    tokens = Tokens(new, old, advantages, x.segments, x.get("selected"))
    leaf = new.clone().requires_grad_() if by_autograd else new
    with torch.set_grad_enabled(by_autograd):
        terms: LossTerms = function(settings, replace(tokens, new=leaf))
    values = terms.values.detach()
    sums.add(diagnostics.ratio_sums(tokens))
    sums.add(diagnostics.clip_sums(terms, x.segments))
    importance = _importance(config, x, denominators, sums)
    if terms.per_sample:
        weights: Tensor | float = _sample_weights(values, importance, x, denominators)
        outer = x.segments.expand(weights)
    else:
        weights = x.silence(token_weights(config.aggregation, x.segments, denominators, new), new)
        weights = weights if importance is None else importance * weights
        outer = weights
    loss = weighted_sum(values, weights)
    sums.totals["policy/loss"] = loss.double()
    if terms.slope is not None:
        return _Share(loss, terms.slope * outer)
    grads = weights if isinstance(weights, Tensor) else torch.full_like(values, weights)
    (slope,) = torch.autograd.grad(terms.values, leaf, grads)
    return _Share(loss, slope)


def _importance(config: Any, x: Inputs, denominators: Denominators, sums: Sums) -> Tensor | None:
    """Importance weights old/behaviour [N] to multiply the loss with; None where none are configured."""
    old, behaviour = x.need("old", "the mismatch"), x.get("behaviour")
    if behaviour is not None:
        sums.add(diagnostics.mismatch(old, behaviour, x.segments))
        sums.add(mismatch_clips(config.loss, old=old, behaviour=behaviour, segments=x.segments))
    if config.correction is None or config.correction.importance is None:
        return None
    wanted = config.correction.importance
    ratios = log_importance(wanted.level, old, x.need("behaviour", "correction.importance"), x.segments).exp()
    weights = bounded(wanted, ratios)
    sums.add(diagnostics.weight_sums(weights, ratios))
    return weights / normaliser(wanted, denominators)


def _sample_weights(values: Tensor, importance: Tensor | None, x: Inputs, denominators: Denominators) -> Tensor:
    """[S]: a mean over samples; a sample's importance is the geometric mean of its tokens' weights."""
    weights = torch.full_like(values, 1.0 / max(denominators.samples, 1.0))
    return weights if importance is None else weights * x.segments.mean(importance.log()).exp()


def _pairs(config: Any, x: Inputs, pairs: Tensor | None, denominators: Denominators, sums: Sums) -> _Share:
    """The preference loss; pairs with a token that is not finite, or with an empty sample, add nothing."""
    if pairs is None:
        raise AlgorithmError("loss 'dpo' needs 'pairs': int64 [P, 2], chosen and rejected sample")
    new = x.need("new", "loss 'dpo'")
    reference = None if config.reference_free else x.need("reference", "loss 'dpo' without 'reference_free'")
    usable = x.segments.lengths > 0
    if x.bad is not None:
        usable &= x.segments.sum(x.bad.double()) == 0
    terms = dpo(config, new=new, reference=reference, pairs=pairs[usable[pairs].all(1)], segments=x.segments)
    scale = 1.0 / max(denominators.pairs, 1.0)
    loss = terms.values.sum() * scale
    sums.add(terms.sums)
    sums.totals["policy/loss"] = loss.double()
    return _Share(loss, x.segments.expand(terms.slope * scale))


def _add_kl(
    config: Any, x: Inputs, share: _Share, denominators: Denominators, coefficient: float | None, sums: Sums
) -> None:
    """KL(new ‖ reference): measured where a reference is given, added to the loss where configured."""
    term = config.kl
    in_loss = term is not None and term.kind == "loss"
    reference = x.need("reference", "kl of kind 'loss'") if in_loss else x.get("reference")
    if reference is None:
        return
    new = x.need("new", "kl")
    sums.per_token["reference/kl_k1"] = total(new - reference)
    sums.per_token["reference/kl_k3"] = total(kl_estimate(new, reference, "k3")[0])
    if term is None or not in_loss:
        return
    value, slope = kl_estimate(new, reference, term.estimator)
    weights = x.silence(token_weights(config.aggregation, x.segments, denominators, new), new)
    scaled = weights * (term.coefficient if coefficient is None else coefficient)
    added = weighted_sum(value, scaled)
    sums.totals["reference/kl_loss"] = added.double()
    share.loss = share.loss + added
    share.slope = share.slope + slope * scaled


def _with_entropy(
    config: Any, x: Inputs, loss: Tensor, entropy: Tensor | None, batch: Jagged, denominators: Denominators, sums: Sums
) -> Tensor:
    """The entropy bonus, whose gradient is autograd's; measured only where its coefficient is 0."""
    if entropy is None:
        if config.entropy_coefficient:
            raise AlgorithmError("'entropy_coefficient' is set, but no 'entropy' was given")
        return loss
    measured = x.need("entropy", "the entropy bonus")
    sums.per_token["policy/entropy"] = total(measured)
    if not config.entropy_coefficient:
        return loss
    weights = x.silence(token_weights(config.aggregation, x.segments, denominators, measured), measured)
    live = batch.gather(entropy)
    live = live if x.bad is None else torch.where(x.bad, 0.0, live)
    bonus = config.entropy_coefficient * weighted_sum(live, weights)
    sums.totals["policy/entropy_bonus"] = bonus.detach().double()
    return loss - bonus
