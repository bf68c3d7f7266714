"""KL estimators, importance weights, rejection and mismatch metrics against verl 0.9.1; DPO against TRL 0.19.1."""

import pytest
import torch

from headrace.algorithms import kl
from headrace.algorithms.batch import Jagged
from headrace.algorithms.corrections import importance_weights, normaliser, rejected
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.diagnostics import mismatch_sums
from headrace.algorithms.objective import finish_metrics, policy_objective
from headrace.blocks.algorithms import Algorithm
from headrace.blocks.algorithms.terms import Correction, KLLoss


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl(golden, estimator):
    case = golden.cases["kl/" + estimator]
    value, slope = kl.kl_estimate(golden.flat("new"), golden.flat("ref"), estimator)
    mask = golden.batch.mask
    torch.testing.assert_close(value, torch.tensor(case["kl"], dtype=torch.float64).reshape(-1), rtol=1e-6, atol=1e-12)
    wanted = torch.tensor(case["grad"], dtype=torch.float64).reshape(-1)
    torch.testing.assert_close(slope * mask, wanted, rtol=1e-6, atol=1e-9)


def test_adaptive_controller(golden):
    config = KLLoss.model_validate({"coefficient": 0.2, "adaptive": {"target": 6.0, "horizon": 10_000}})
    coefficient, seen = 0.2, []
    for measured in (3.0, 6.0, 9.0, 20.0):
        coefficient = kl.adapt_coefficient(config, coefficient, measured, 256)
        seen.append(coefficient)
    assert seen == pytest.approx(golden.cases["kl/adaptive"], rel=1e-12)
    assert kl.adapt_coefficient(KLLoss(coefficient=0.2), 0.2, 9.0, 256) == 0.2


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("bound", ["2.0", "0.5_5.0"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(golden, level, bound, normalise):
    case = golden.cases[f"is/{level}|{bound}|normalise={normalise}"]
    tamed = {"kind": "mask", "low": 0.5, "high": 5.0} if "_" in bound else {"kind": "truncate", "high": 2.0}
    config = Correction.model_validate({"importance": {"level": level, "bound": tamed, "normalise": normalise}})
    assert config.importance is not None
    old, behaviour = golden.flat("old"), golden.flat("roll")
    weights = importance_weights(config.importance, old=old, behaviour=behaviour, batch=golden.batch)
    denominators = Denominators.of(golden.batch, weights=weights)
    applied = weights / normaliser(config.importance, denominators)
    torch.testing.assert_close(applied, torch.tensor(case["w"], dtype=torch.float64).reshape(-1), rtol=1e-6, atol=1e-9)

    algorithm = Algorithm.model_validate({"correction": config.model_dump()})
    sums = policy_objective(
        algorithm,
        new=golden.flat("new").requires_grad_(),
        old=old,
        behaviour=behaviour,
        advantages=golden.flat("adv"),
        batch=golden.batch,
        denominators=denominators,
    ).sums
    metrics, theirs = finish_metrics(sums), case["metrics"]
    assert metrics["correction/ess"] == pytest.approx(theirs["rollout_is_eff_sample_size"], rel=1e-6)
    assert metrics["correction/mean"] == pytest.approx(theirs["rollout_is_mean"], rel=1e-6)


REJECTIONS = {
    "token_k1|0.9_1.1": [{"kind": "ratio", "level": "token", "low": 0.9, "high": 1.1}],
    "token_k2|0.01": [{"kind": "divergence", "level": "token", "estimator": "k2", "high": 0.01}],
    "token_k3|0.01": [{"kind": "divergence", "level": "token", "high": 0.01}],
    "seq_sum_k1|0.8_1.25": [{"kind": "ratio", "level": "sequence-sum", "low": 0.8, "high": 1.25}],
    "seq_sum_k2|0.02": [{"kind": "divergence", "level": "sequence-sum", "estimator": "k2", "high": 0.02}],
    "seq_sum_k3|0.02": [{"kind": "divergence", "level": "sequence-sum", "high": 0.02}],
    "seq_mean_k1|0.97_1.03": [{"kind": "ratio", "level": "sequence-mean", "low": 0.97, "high": 1.03}],
    "seq_mean_k2|0.004": [{"kind": "divergence", "level": "sequence-mean", "estimator": "k2", "high": 0.004}],
    "seq_mean_k3|0.004": [{"kind": "divergence", "level": "sequence-mean", "high": 0.004}],
    "seq_max_k2|0.02": [{"kind": "divergence", "level": "sequence-max", "estimator": "k2", "high": 0.02}],
    "seq_max_k3|0.02": [{"kind": "divergence", "level": "sequence-max", "high": 0.02}],
    "token_k1,seq_mean_k3|0.9_1.1,0.004": [
        {"kind": "ratio", "level": "token", "low": 0.9, "high": 1.1},
        {"kind": "divergence", "level": "sequence-mean", "high": 0.004},
    ],
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection(golden, name):
    tests = Correction.model_validate({"reject": REJECTIONS[name]}).reject
    tokens, samples = rejected(tests, old=golden.flat("old"), behaviour=golden.flat("roll"), batch=golden.batch)
    kept = golden.batch.accept(~samples, ~tokens).mask
    assert torch.equal(kept, torch.tensor(golden.cases["rs/" + name]["mask"]).reshape(-1).bool())


def test_mismatch_metrics(golden):
    theirs = golden.cases["offpolicy"]
    sums = mismatch_sums(old=golden.flat("old"), behaviour=golden.flat("roll"), batch=golden.batch)
    metrics = {name.removeprefix("mismatch/"): value for name, value in finish_metrics(sums).items()}
    names = {
        "perplexity_old": "training_ppl",
        "log_perplexity_old": "training_log_ppl",
        "perplexity_behaviour": "rollout_ppl",
        "log_perplexity_behaviour": "rollout_log_ppl",
        "kl_k1": "kl",
        "kl_k3": "k3_kl",
        "abs_log_perplexity_difference": "log_ppl_abs_diff",
        "max_log_perplexity_difference": "log_ppl_diff_max",
        "perplexity_ratio": "ppl_ratio",
        "chi2": "chi2_token",
        "chi2_sample": "chi2_seq",
    }
    assert {ours: metrics[ours] for ours in names} == pytest.approx({o: theirs[t] for o, t in names.items()}, rel=1e-6)
    difference = metrics["log_perplexity_old"] - metrics["log_perplexity_behaviour"]
    assert difference == pytest.approx(theirs["log_ppl_diff"], rel=1e-6)


@pytest.mark.parametrize("case", range(7))
def test_dpo(trl_dpo, case):
    wanted, inputs = trl_dpo["cases"][case], trl_dpo["inputs"]
    algorithm = Algorithm.model_validate({"preset": "dpo", "loss": wanted["options"]})
    batch = Jagged.from_lengths(inputs["lengths"])
    pairs = torch.tensor(inputs["pairs"])
    new = torch.tensor(inputs["new"], dtype=torch.float64).requires_grad_()
    objective = policy_objective(
        algorithm,
        new=new,
        reference=torch.tensor(inputs["reference"], dtype=torch.float64),
        batch=batch,
        pairs=pairs,
        denominators=Denominators.of(batch, pairs=pairs),
    )
    objective.loss.backward()
    assert objective.loss.item() == pytest.approx(sum(wanted["losses"]) / len(pairs), rel=1e-6)
    torch.testing.assert_close(new.grad, torch.tensor(wanted["grad"], dtype=torch.float64), rtol=1e-6, atol=1e-12)
    if wanted["options"].get("reference_free"):  # TRL's rewards have the reference in them all the same
        return
    metrics = finish_metrics(objective.sums)
    assert metrics["dpo/chosen_reward"] == pytest.approx(sum(wanted["chosen_rewards"]) / len(pairs), rel=1e-6)
    assert metrics["dpo/rejected_reward"] == pytest.approx(sum(wanted["rejected_rewards"]) / len(pairs), rel=1e-6)
