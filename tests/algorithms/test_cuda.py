"""The same numbers on a GPU; runs where there is one."""

from typing import Any

import pytest
import torch

from headrace.algorithms import fused
from headrace.algorithms.advantages import advantages
from headrace.algorithms.batch import Jagged
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.logprobs import token_logprobs
from headrace.algorithms.objective import finish_metrics, policy_objective
from headrace.blocks.algorithms import Algorithm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "reinforce", "dppo"])
@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo"])
def test_step(loss, estimator):
    config = Algorithm.model_validate(
        {
            "advantage": {"kind": estimator},
            "loss": {"kind": loss},
            "aggregation": None if loss == "gmpo" else {"kind": "seq-mean-token-mean"},
            "correction": {"importance": {"level": "sequence"}},
            "kl": {"kind": "loss", "coefficient": 0.1},
        }
    )
    torch.manual_seed(0)
    lengths = torch.randint(0, 90, (64,))
    mask = torch.rand(int(lengths.sum())) < 0.9
    new = -2 * torch.rand(len(mask), dtype=torch.float64)
    columns = {name: new + 0.1 * torch.randn_like(new) for name in ("old", "behaviour", "reference")}
    values, rewards = torch.randn_like(new), torch.rand(64, dtype=torch.float64)

    def step(device):
        batch = Jagged.from_lengths(lengths.to(device), mask.to(device))
        given: dict[str, Any] = {name: x.to(device) for name, x in columns.items()}
        old, behaviour = given["old"], given["behaviour"]
        groups = (torch.arange(64) // 8).to(device)
        result = advantages(
            config,
            rewards=rewards.to(device),
            groups=groups,
            batch=batch,
            values=values.to(device),
            old=old,
            behaviour=behaviour,
        )
        live = new.clone().to(device).requires_grad_()
        objective = policy_objective(
            config,
            new=live,
            advantages=result.values,
            batch=result.batch,
            denominators=Denominators.of(result.batch),
            **given,
        )
        objective.loss.backward()
        assert live.grad is not None
        return objective.loss.item(), live.grad.cpu(), finish_metrics(objective.sums)

    (loss_a, grad_a, metrics_a), (loss_b, grad_b, metrics_b) = step("cpu"), step("cuda")
    assert loss_a == pytest.approx(loss_b, rel=1e-9)
    torch.testing.assert_close(grad_a, grad_b, rtol=1e-9, atol=1e-12)
    assert metrics_a == pytest.approx(metrics_b, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("way", ["chunked", "fused"])
def test_logprobs(way):
    if way == "fused" and not fused.available(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("liger-kernel[cutedsl] is not installed, or the GPU is no Hopper")
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16) * 0.1).requires_grad_()
    targets = torch.randint(0, 5000, (300,), device="cuda")
    outer = torch.randn(2, 300, device="cuda")
    bias = weight.new_zeros(5000) if way == "chunked" else None
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperature=0.7, bias=bias, entropy=True)
    (logprobs * outer[0] + entropies * outer[1]).sum().backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = (exact_hidden @ exact_weight.t() / 0.7).log_softmax(-1)
    exact_logprobs, exact_entropies = exact.gather(1, targets[:, None]).squeeze(1), -(exact.exp() * exact).sum(-1)
    (exact_logprobs * outer[0] + exact_entropies * outer[1]).sum().backward()
    assert (logprobs - exact_logprobs).abs().max() < 0.05
    assert (entropies - exact_entropies).abs().max() < 0.05
    for x, e in ((hidden, exact_hidden), (weight, exact_weight)):
        assert x.grad is not None and e.grad is not None
        assert (x.grad.double() - e.grad).norm() / e.grad.norm() < 0.02
