"""Drawing tokens: the right distribution, the right log-probabilities, no token without probability."""

import pytest
import torch

from headrace.engines.rollout.sampler import NonFiniteLogits, draw


@pytest.mark.parametrize("vocabulary", [5, 128, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_follow_the_softmax(vocabulary: int, temperature: float):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocabulary, generator=generator) * 2
    n = 20_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs = draw(logits.repeat(n, 1), torch.full((n,), temperature), uniforms)
    expected = torch.log_softmax(logits / temperature, -1)
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-5, rtol=0)
    frequencies = torch.bincount(tokens, minlength=vocabulary) / n
    assert (frequencies - expected.exp()).abs().max() < 2e-4


def test_greedy_rows_among_sampled_ones():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = draw(logits.clone(), torch.tensor([0.0, 1.0]), torch.tensor([0.999, 0.999], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[[0, 1], [1, 2]])


def test_extreme_uniforms_stay_on_tokens_that_have_probability():
    logits = torch.full((4, 400), -torch.inf)
    logits[:, [7, 391]] = torch.tensor([0.3, -1.7])
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = draw(logits, torch.ones(4), uniforms)
    assert tokens.tolist() == [7, 7, 391, 391]


def test_broken_logits_are_refused():
    with pytest.raises(NonFiniteLogits, match="NaN"):
        draw(torch.tensor([[0.0, torch.nan]]), torch.ones(1), torch.zeros(1, dtype=torch.float64))
