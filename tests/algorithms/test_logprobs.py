"""Chunked log-probabilities and entropies against the naive way, and verl's."""

import pytest
import torch

from headrace.algorithms import logprobs
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.logprobs import token_logprobs


def naive(hidden, weight, targets, temperature=1.0, bias=None):
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    p = (logits / temperature).log_softmax(-1)
    return p.gather(1, targets[:, None]).squeeze(1), -(p.exp() * p).sum(-1)


def make(dtype=torch.float64, tokens=23, words=50, width=7):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype).requires_grad_()
    weight = torch.randn(words, width, dtype=dtype).requires_grad_()
    bias = torch.randn(words, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, words, (tokens,))


@pytest.mark.parametrize("kept", [0, 10, 2**30])
@pytest.mark.parametrize("chunk", [None, 1, 8, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients(monkeypatch, kept, chunk, temperature, with_bias):
    monkeypatch.setattr(logprobs, "KEEP_BYTES", kept * 50 * 8)
    hidden, weight, bias, targets = make()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    given = bias if with_bias else None
    outer = torch.randn(2, len(targets), dtype=torch.float64)
    options = {"temperature": temperature, "bias": given, "chunk": chunk}
    wanted = naive(hidden, weight, targets, temperature, given)
    both = token_logprobs(hidden, weight, targets, entropy=True, **options)
    for mine, want in ((both, wanted), ((token_logprobs(hidden, weight, targets, **options),), wanted[:1])):
        grads = []
        for values in (mine, want):
            weighted = torch.stack([x.dot(g) for x, g in zip(values, outer, strict=False)])
            grads.append(torch.autograd.grad(weighted.sum(), inputs, retain_graph=True))
        for a, b in zip((*mine, *grads[0]), (*want, *grads[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_second_backward_pass_computes_again():
    hidden, weight, _, targets = make()
    value = token_logprobs(hidden, weight, targets, temperature=0.5).sum()
    first = torch.autograd.grad(value, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(value, [hidden, weight])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_bfloat16():
    hidden, weight, _, targets = make(torch.bfloat16)
    value, entropy = token_logprobs(hidden, weight, targets, entropy=True, chunk=8)
    assert value.dtype == entropy.dtype == torch.float32
    logits = (hidden @ weight.t()).float()
    p = logits.log_softmax(-1)
    torch.testing.assert_close(value, p.gather(1, targets[:, None]).squeeze(1))
    torch.testing.assert_close(entropy, -(p.exp() * p).sum(-1), rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(value.sum(), [hidden, weight])
    want = torch.autograd.grad(p.gather(1, targets[:, None]).sum(), [hidden, weight])
    for a, b in zip(mine, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.01


def test_no_tokens():
    hidden, weight, _, targets = make(tokens=0)
    value, entropy = token_logprobs(hidden, weight, targets, entropy=True)
    (value.sum() + entropy.sum()).backward()
    assert len(value) == len(entropy) == 0
    assert weight.grad is not None and not weight.grad.any()


def test_no_gradient_is_kept_for_nothing():
    hidden, weight, _, targets = make()
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, targets).requires_grad
    frozen = token_logprobs(hidden, weight.detach(), targets)
    frozen.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_agrees_with_verl(golden):
    logits = torch.tensor(golden.inputs["logits"], dtype=torch.float64).reshape(-1, 11)
    labels = torch.tensor(golden.inputs["labels"]).reshape(-1).long()
    eye = torch.eye(11, dtype=torch.float64)
    value, entropy = token_logprobs(logits, eye, labels, entropy=True)
    for mine, name in ((value, "logprobs"), (entropy, "entropy")):
        torch.testing.assert_close(
            mine, torch.tensor(golden.cases[name], dtype=torch.float64).reshape(-1), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "expected hidden"),
        ({"weight": torch.zeros(5, 7)}, "convert one of them"),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_wrong_inputs(change, message):
    hidden, weight, _, targets = make()
    with pytest.raises(AlgorithmError, match=message):
        token_logprobs(**{"hidden": hidden, "weight": weight, "targets": targets, **change})
