"""Computes tests/golden/verl.json with verl 0.9.1's own functions, in float64 on the CPU.

From the root of the repository: ``python -m tests.golden.make_verl tests/golden/verl.json``. The inputs are those in
the file, so that a second run gives the same file.
"""

import json
import sys
from pathlib import Path

from benchmarks import verl_reference

verl_reference.prepare()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import verl  # pyright: ignore[reportMissingImports]  # noqa: E402
import verl.utils.torch_functional as functional  # pyright: ignore[reportMissingImports]  # noqa: E402
from verl.trainer.config import AlgoConfig  # pyright: ignore[reportMissingImports]  # noqa: E402
from verl.trainer.ppo import core_algos, rollout_corr_helper  # pyright: ignore[reportMissingImports]  # noqa: E402
from verl.workers.config.actor import ActorConfig, PolicyLossConfig  # pyright: ignore[reportMissingImports]  # noqa: E402

torch.set_default_dtype(torch.float64)
path = Path(sys.argv[1])
inputs = json.loads(path.read_text())["inputs"]
X = {name: torch.tensor(value) for name, value in inputs.items() if not name.startswith("uid")}
mask, mask2, labels = X["mask"].long(), X["mask2"].long(), X["labels"].long()
uid, uid_single = (np.array(inputs[name], dtype=object) for name in ("uid", "uid_single"))
cases: dict = {}


def numbers(values: dict) -> dict:
    return {name: float(value) for name, value in values.items()}


def advantage(name: str, response_mask=mask, rewards=X["rew"], **options) -> None:
    function = core_algos.get_adv_estimator_fn(name.split(":")[0])
    a, r = function(token_level_rewards=rewards.clone(), response_mask=response_mask, **options)
    cases["adv/" + name] = {"adv": a.tolist(), "ret": r.tolist()}


def config(mode: str, policy: dict | None = None, **options) -> ActorConfig:
    policy_loss = PolicyLossConfig(loss_mode=mode, dro_beta=0.1, **(policy or {}))
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, **options)


def loss(name: str, mode: str, aggregation="token-mean", settings=None, weights=None, old=X["old"], info=None) -> None:
    settings = settings or config(mode)
    settings.global_batch_info.update(info or {})
    torch.manual_seed(1)  # clip_cov draws its tokens
    new = X["new"].clone().requires_grad_()
    value, metrics = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=old,
        log_prob=new,
        advantages=X["adv"],
        response_mask=mask,
        loss_agg_mode=aggregation,
        config=settings,
        rollout_is_weights=weights,
    )
    value.backward()
    assert new.grad is not None
    cases["loss/" + name] = {"loss": value.item(), "grad": new.grad.tolist(), "metrics": numbers(metrics)}


for tokens, tag in ((mask, ""), (mask2, "+obsmask")):
    advantage("gae:" + tag, tokens, X["rew_proc"], values=X["values"], gamma=0.99, lam=0.95)
    advantage("reinforce_plus_plus:" + tag, tokens, config=AlgoConfig(gamma=0.9))
for name in ("grpo", "grpo_vectorized"):
    for std in (True, False):
        advantage(f"{name}:std={std}", index=uid, norm_adv_by_std_in_grpo=std)
    advantage(f"{name}:singleton", index=uid_single)
for name in ("rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline", "gpg", "grpo_passk", "gdpo"):
    advantage(name, index=uid, config=AlgoConfig(gamma=1.0, lam=0.95))
advantage("remax", reward_baselines=torch.linspace(0, 0.7, len(mask)))
for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
    advantage(name, index=uid, old_log_probs=X["old"], sum_pi_squared=X["sum_pi2"])

every = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
weights, _ = rollout_corr_helper.compute_rollout_correction_weights(X["old"] - X["roll"], mask, "token", 2.0)
modes = ["vanilla", "gspo", "sapo", "cispo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl", "dro"]
for mode in modes:
    for aggregation in every if mode in ("vanilla", "gspo") else ["token-mean", "seq-mean-token-mean"]:
        loss(f"{mode}|{aggregation}", mode, aggregation)
    loss(f"{mode}|token-mean|is_weights", mode, weights=weights)
loss("vanilla|clip_higher_0.2_0.28", "vanilla", settings=config("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.28))
loss("vanilla|clip_ratio_only_0.01", "vanilla", settings=config("vanilla", clip_ratio=0.01))
whole = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 16, "loss_scale_factor": None}
loss("vanilla|dp2_tokens90", "vanilla", info=whole)
sharp = config("gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
loss("gspo|3e-4_4e-4", "gspo", "seq-mean-token-mean", settings=sharp)
for mode in ("dppo_tv", "dppo_kl"):
    loss(f"{mode}|0.02_0.03", mode, settings=config(mode, clip_ratio_low=0.02, clip_ratio_high=0.03))
loss("vanilla|dual_clip_1.1", "vanilla", settings=config("vanilla", clip_ratio_c=1.1))
bypass = {
    "is_sequence": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "rs_seq_mean_k1": {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"},
}
for kind in ("ppo_clip", "reinforce"):
    for name, options in bypass.items():
        policy = {"rollout_correction": {"loss_type": kind, **options}}
        loss(f"bypass_mode|{kind}|{name}", "bypass_mode", settings=config("bypass_mode", policy), old=X["roll"])

for name in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
    new = X["new"].clone().requires_grad_()
    kl = core_algos.kl_penalty(new, X["ref"], name)
    (kl * mask).sum().backward()
    assert new.grad is not None
    cases["kl/" + name] = {"kl": kl.tolist(), "grad": new.grad.tolist()}
controller = core_algos.AdaptiveKLController(0.2, 6.0, 10000)
cases["kl/adaptive"] = []
for measured in (3.0, 6.0, 9.0, 20.0):
    controller.update(measured, 256)
    cases["kl/adaptive"].append(controller.value)
prediction = X["vpred"].clone().requires_grad_()
value, fraction = core_algos.compute_value_loss(prediction, X["rew"], X["values"], mask, 0.5)
value.backward()
assert prediction.grad is not None
cases["value/clip0.5"] = {"loss": value.item(), "clipfrac": float(fraction), "grad": prediction.grad.tolist()}
cases["entropy"] = functional.entropy_from_logits(X["logits"]).tolist()
cases["logprobs"] = functional.logprobs_from_logits_v2(X["logits"], labels).tolist()

log_ratio = X["old"] - X["roll"]
for level in ("token", "sequence"):
    for bound in (2.0, "0.5_5.0"):
        for normalise in (False, True):
            w, metrics = rollout_corr_helper.compute_rollout_correction_weights(
                log_ratio, mask, level, bound, normalise
            )
            cases[f"is/{level}|{bound}|normalise={normalise}"] = {"w": w.tolist(), "metrics": numbers(metrics)}
bounds = {
    "token_k1": "0.9_1.1",
    "token_k2": 0.01,
    "token_k3": 0.01,
    "seq_sum_k1": "0.8_1.25",
    "seq_sum_k2": 0.02,
    "seq_sum_k3": 0.02,
    "seq_mean_k1": "0.97_1.03",
    "seq_mean_k2": 0.004,
    "seq_mean_k3": 0.004,
    "seq_max_k2": 0.02,
    "seq_max_k3": 0.02,
    "token_k1,seq_mean_k3": "0.9_1.1,0.004",
}
for name, bound in bounds.items():
    kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, name, bound)
    cases[f"rs/{name}|{bound}"] = {"mask": kept.tolist()}
cases["offpolicy"] = numbers(rollout_corr_helper.compute_offpolicy_metrics(X["old"], X["roll"], mask))

versions = {"verl": verl.__version__, "torch": torch.__version__, "numpy": np.__version__}
path.write_text(json.dumps({"versions": versions, "inputs": inputs, "cases": cases}))
print(len(cases), "cases", versions)
