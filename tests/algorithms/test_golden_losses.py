"""Policy and value losses against verl 0.9.1: values, gradients, clip fractions; and where we differ on purpose."""

import numpy as np
import pytest
import torch

from headrace.algorithms.corrections import rejected
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.losses.covariance import select
from headrace.algorithms.objective import finish_metrics, policy_objective
from headrace.algorithms.value import value_objective
from headrace.blocks.algorithms import Algorithm
from headrace.blocks.algorithms.terms import Correction

WIDTH = 12
AGGREGATIONS = {
    "token-mean": {"kind": "token-mean"},
    "token-sum": {"kind": "token-sum"},
    "seq-mean-token-sum": {"kind": "seq-mean-token-sum"},
    "seq-mean-token-mean": {"kind": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"kind": "seq-mean-token-sum-norm", "constant": WIDTH},
}
TOKEN_TIS = {"importance": {"level": "token", "bound": {"kind": "truncate", "high": 2.0}}}
LOSSES = {
    "vanilla": {"kind": "ppo_clip", "dual_clip": 3.0},
    "gspo": {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "sapo": {"kind": "sapo"},
    "cispo": {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.2},
    "gpg": {"kind": "reinforce"},
    "clip_cov": {"kind": "clip_cov"},
    "kl_cov": {"kind": "kl_cov", "penalty": 0.1},
    "geo_mean": {"kind": "gmpo", "clip_low": 0.2, "clip_high": 0.2},
    "dppo_tv": {"kind": "dppo", "divergence": "tv", "truncate": 3.0},
    "dppo_kl": {"kind": "dppo", "divergence": "kl", "truncate": 3.0},
    "dro": {"kind": "dro", "beta": 0.1},
}


def algorithm(loss: dict, aggregation: str = "token-mean", **more) -> Algorithm:
    given = None if loss["kind"] == "gmpo" else AGGREGATIONS[aggregation]
    return Algorithm.model_validate({"preset": "grpo", "loss": loss, "aggregation": given, **more})


def run(golden, config: Algorithm, denominators: Denominators | None = None, **inputs):
    new = golden.flat("new").requires_grad_()
    batch = inputs.pop("batch", golden.batch)
    objective = policy_objective(
        config,
        new=new,
        batch=batch,
        denominators=denominators or Denominators.of(batch),
        **{"old": golden.flat("old"), "advantages": golden.flat("adv"), **inputs},
    )
    objective.loss.backward()
    return objective.loss.item(), new.grad, finish_metrics(objective.sums)


def check(golden, name: str, loss: float, grad) -> dict:
    case = golden.cases["loss/" + name]
    assert loss == pytest.approx(case["loss"], rel=1e-6)
    wanted = torch.tensor(case["grad"], dtype=torch.float64).reshape(-1)
    torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-9)
    return case["metrics"]


def selection(golden, name: str, loss: dict):
    """The tokens of a covariance loss; clip_cov's is the one that verl's random draw took."""
    if loss["kind"] == "kl_cov":
        config = algorithm(loss).loss
        return select(config, logprobs=golden.flat("new"), advantages=golden.flat("adv"), batch=golden.batch)
    if loss["kind"] != "clip_cov":
        return None
    _, clipped_grad, _ = run(golden, algorithm({"kind": "ppo_clip"}))
    grad = torch.tensor(golden.cases["loss/" + name]["grad"]).reshape(-1)
    return (grad == 0) & (clipped_grad != 0)


def variants() -> list[tuple[str, str]]:
    """verl's cases, but for SAPO's that differ on purpose (test_sapo_honours_the_aggregation)."""
    few = ["token-mean", "seq-mean-token-mean"]
    every = {loss: AGGREGATIONS if loss in ("vanilla", "gspo") else few for loss in LOSSES}
    cases = [(loss, variant) for loss in LOSSES for variant in [*every[loss], "token-mean|is_weights"]]
    return [(loss, variant) for loss, variant in cases if loss != "sapo" or not variant.startswith("token-mean")]


@pytest.mark.parametrize(("loss", "variant"), variants())
def test_loss_and_gradient(golden, loss, variant):
    name = f"{loss}|{variant}"
    weighted = variant.endswith("is_weights")
    more = {"correction": TOKEN_TIS} if weighted else {}
    config = algorithm(LOSSES[loss], variant.split("|")[0], **more)
    inputs = {"behaviour": golden.flat("roll")} if weighted else {}
    value, grad, metrics = run(golden, config, selected=selection(golden, name, LOSSES[loss]), **inputs)
    theirs = check(golden, name, value, grad)
    assert metrics["policy/kl_k1"] == pytest.approx(theirs.get("actor/ppo_kl", metrics["policy/kl_k1"]), rel=1e-6) or (
        loss == "kl_cov"  # its 'ppo_kl' is the mean |log ratio|
        and metrics["ratio/mean_abs_log"] == pytest.approx(theirs["actor/ppo_kl"], rel=1e-6)
    )
    if loss in ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl"):
        assert metrics["policy/clip_fraction"] == pytest.approx(theirs["actor/pg_clipfrac"], rel=1e-6)


def test_sapo_honours_the_aggregation(golden):
    """verl's SAPO is seq-mean-token-mean whatever is configured; ours is what is configured."""
    value, grad, _ = run(golden, algorithm({"kind": "sapo"}, "seq-mean-token-mean"))
    check(golden, "sapo|token-mean", value, grad)
    value, _, _ = run(golden, algorithm({"kind": "sapo"}, "token-mean"))
    new, old, a = (golden.flat(x)[golden.batch.mask].numpy() for x in ("new", "old", "adv"))
    tau = np.where(a > 0, 1.0, 1.05)
    assert value == pytest.approx(np.mean(-a * 4 / tau / (1 + np.exp(-tau * (np.exp(new - old) - 1)))), rel=1e-12)
    weighted = algorithm({"kind": "sapo"}, "seq-mean-token-mean", correction=TOKEN_TIS)
    check(golden, "sapo|token-mean|is_weights", *run(golden, weighted, behaviour=golden.flat("roll"))[:2])


def test_gmpo_counts_effective_clips(golden):
    """verl counts every ratio out of range in two figures; ours tells those that changed the loss apart."""
    _, _, metrics = run(golden, algorithm(LOSSES["geo_mean"]))
    theirs = golden.cases["loss/geo_mean|token-mean"]["metrics"]
    both = theirs["actor/pg_clipfrac"] + theirs["actor/pg_clipfrac_lower"]
    assert metrics["policy/out_of_range_fraction"] == pytest.approx(both, rel=1e-6)
    assert metrics["policy/clip_fraction"] == pytest.approx(11 / 57)


@pytest.mark.parametrize(
    ("name", "loss", "aggregation"),
    [
        ("vanilla|clip_higher_0.2_0.28", {"kind": "ppo_clip", "clip_high": 0.28, "dual_clip": 3.0}, "token-mean"),
        ("vanilla|dual_clip_1.1", {"kind": "ppo_clip", "dual_clip": 1.1}, "token-mean"),
        ("gspo|3e-4_4e-4", {"kind": "gspo"}, "seq-mean-token-mean"),
        ("dppo_tv|0.02_0.03", {**LOSSES["dppo_tv"], "low": 0.02, "high": 0.03}, "token-mean"),
        ("dppo_kl|0.02_0.03", {**LOSSES["dppo_kl"], "low": 0.02, "high": 0.03}, "token-mean"),
    ],
)
def test_bounds(golden, name, loss, aggregation):
    value, grad, metrics = run(golden, algorithm(loss, aggregation))
    theirs = check(golden, name, value, grad)
    lower = 0.0 if "dual" not in name else theirs["actor/pg_clipfrac_lower"]
    assert metrics["policy/clip_fraction"] == pytest.approx(theirs["actor/pg_clipfrac"] + lower, rel=1e-6)


def test_ranks_are_summed_not_averaged(golden):
    """verl multiplies each rank's loss by the number of ranks, to be averaged; our shares are to be added."""
    value, grad, _ = run(golden, algorithm(LOSSES["vanilla"]), Denominators(tokens=90, samples=16))
    check(golden, "vanilla|dp2_tokens90", 2 * value, 2 * grad)
    assert value == pytest.approx(-0.3607630144, rel=1e-6)


def test_clip_ratio_alone_cannot_be_said(golden):
    """In verl, ``clip_ratio=0.01`` alone changes nothing; here there is no such setting."""
    same = golden.cases["loss/vanilla|clip_ratio_only_0.01"]["loss"]
    assert same == golden.cases["loss/vanilla|token-mean"]["loss"]
    with pytest.raises(ValueError, match="'clip_ratio' has no effect with loss 'ppo_clip'"):
        algorithm({"kind": "ppo_clip", "clip_ratio": 0.01})


def test_dppo_truncation_is_its_own(golden):
    """verl's DPPO takes PPO's dual clip (3) for its truncation and never its own default (20); ours is separate."""
    old = golden.flat("new") - 2.5
    values = [
        run(golden, algorithm({"kind": "dppo", "high": 5.0, "low": 5.0, "truncate": c}), old=old)[0] for c in (3, 20)
    ]
    assert values[1] == pytest.approx(values[0] * torch.tensor(2.5).exp().item() / 3, rel=1e-6)


@pytest.mark.parametrize("name", ["is_sequence", "rs_seq_mean_k1"])
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_bypass(golden, loss, name):
    """verl's bypass mode in our words: ratio, weights and rejection compare new and behaviour."""
    behaviour, new = golden.flat("roll"), golden.flat("new")
    batch, correction = golden.batch, None
    old = behaviour if loss == "ppo_clip" else new
    if name.startswith("rs"):
        test = {"kind": "ratio", "level": "sequence-mean", "low": 0.9, "high": 1.1}
        tests = Correction.model_validate({"reject": [test]}).reject
        batch = batch.accept(~rejected(tests, old=new, behaviour=behaviour, batch=batch)[1])
    elif loss == "reinforce":
        correction = {"importance": {"level": "sequence"}}
    settings = LOSSES["vanilla" if loss == "ppo_clip" else "gpg"]
    value, grad, _ = run(golden, algorithm(settings, correction=correction), old=old, behaviour=behaviour, batch=batch)
    check(golden, f"bypass_mode|{loss}|{name}", value, grad)


def test_value_loss(golden):
    case = golden.cases["value/clip0.5"]
    new = golden.flat("vpred").requires_grad_()
    config = Algorithm.model_validate({"preset": "ppo", "value": {"clip": 0.5}})
    objective = value_objective(
        config,
        new=new,
        old=golden.flat("values"),
        returns=golden.flat("rew"),
        batch=golden.batch,
        denominators=Denominators.of(golden.batch),
    )
    objective.loss.backward()
    assert objective.loss.item() == pytest.approx(case["loss"], rel=1e-6)
    torch.testing.assert_close(
        new.grad, torch.tensor(case["grad"], dtype=torch.float64).reshape(-1), rtol=1e-6, atol=1e-9
    )
    metrics = finish_metrics(objective.sums)
    assert metrics["value/clip_fraction"] == pytest.approx(case["clipfrac"], abs=1e-6)
    rewards, v = golden.flat("rew")[golden.batch.mask], golden.flat("vpred")[golden.batch.mask]
    variance = rewards.var(correction=0)
    assert metrics["value/explained_variance"] == pytest.approx(float(1 - (rewards - v).square().mean() / variance))


def test_every_golden_case_has_a_test(golden):
    special = ["vanilla|clip_higher_0.2_0.28", "vanilla|dual_clip_1.1", "gspo|3e-4_4e-4", "vanilla|dp2_tokens90"]
    special += ["dppo_tv|0.02_0.03", "dppo_kl|0.02_0.03", "vanilla|clip_ratio_only_0.01"]
    special += ["sapo|token-mean", "sapo|token-mean|is_weights"]
    bypass = {f"bypass_mode|{x}|{y}" for x in ("ppo_clip", "reinforce") for y in ("is_sequence", "rs_seq_mean_k1")}
    named = {f"{loss}|{variant}" for loss, variant in variants()} | set(special) | bypass
    assert {c.removeprefix("loss/") for c in golden.cases if c.startswith("loss/")} == named
