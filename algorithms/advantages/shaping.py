"""What is added to the reward before the advantage."""

from typing import Any

from torch import Tensor


def overlong_penalty(config: Any, lengths: Tensor) -> Tensor:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): 0 up to max_length − buffer tokens, then linear to −penalty.

    ``lengths``: tokens that the policy wrote, int64 [S]. Answers beyond ``max_length`` get −penalty, not more.
    """
    excess = lengths - (config.max_length - config.buffer)
    return -config.penalty * (excess / config.buffer).clamp(0, 1)
