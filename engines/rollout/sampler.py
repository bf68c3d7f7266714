"""Drawing tokens from logits with given uniform numbers."""

import torch
import torch.nn.functional as F

BLOCK = 128
"""Tokens whose probabilities are summed before the search; two short searches replace one over the vocabulary."""


class NonFiniteLogits(ArithmeticError):
    """The model's output is NaN or infinite: its weights are broken."""


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token of each row by inverting the cumulative distribution.

    Args:
        logits: float32 [n, vocabulary]; overwritten.
        temperatures: float32 [n]; 0 takes the most probable token and reports log-probabilities at temperature 1.
        uniforms: float64 [n] in [0, 1).

    Returns:
        Tokens int64 [n] and their log-probabilities in nats, float32 [n], of the distribution that was sampled from.

    Raises:
        NonFiniteLogits: a row has no distribution.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)
    if bool((scale != 1).any()):
        logits /= scale[:, None]
    probabilities = torch.softmax(logits, -1)
    if not bool(probabilities[:, 0].isfinite().all()):  # one NaN or +inf makes its whole row NaN
        raise NonFiniteLogits("the model gave NaN or infinite logits; the weights that were loaded last are broken")
    if bool(greedy.all()):
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(probabilities, uniforms)
        if bool(greedy.any()):
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def _invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number; int64 [n]."""
    spare = -probabilities.shape[1] % BLOCK
    padded = F.pad(probabilities, (0, spare)) if spare else probabilities
    blocks = padded.view(len(probabilities), -1, BLOCK)
    cumulative = blocks.sum(-1).double().cumsum(-1)
    target = _below(uniforms[:, None] * cumulative[:, -1:], cumulative[:, -1:])
    block = torch.searchsorted(cumulative, target, right=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    # float32 block sums may exceed the sum of their members by a rounding: stay on a token that has probability
    rest = _below(target - before, inside[:, -1:])
    return (block * BLOCK + torch.searchsorted(inside, rest, right=True))[:, 0]


def _below(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """x, or the greatest number that is less than the limit."""
    return torch.minimum(x, torch.nextafter(limit, limit.new_zeros(())))
