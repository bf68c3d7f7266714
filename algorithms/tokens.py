"""What a policy loss sees, and what it returns: trained tokens only, no masks, no autograd."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from headrace.algorithms.batch import Segments

LOG_RATIO_LIMIT = 20.0
"""Log ratios beyond ±20 nats count as ±20: exp stays finite, and nothing real is out there."""


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a micro-batch; all tensors float [N] and without gradient."""

    new: Tensor
    """Log-probability (nats) under the current policy."""
    old: Tensor
    """Log-probability under the policy at the start of the step."""
    advantages: Tensor
    segments: Segments
    selected: Tensor | None = None
    """bool [N]: tokens that a covariance loss treats differently."""

    @cached_property
    def log_ratio(self) -> Tensor:
        """log(new / old), within ±20."""
        return (self.new - self.old).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio(self) -> Tensor:
        """new / old."""
        return self.log_ratio.exp()


@dataclass(frozen=True)
class LossTerms:
    """A loss before aggregation, with its derivative in closed form.

    ``values``: [N], or [S] where ``per_sample``. ``slope``: [N], the derivative of the token's (or of its sample's)
    value by the token's ``new``. None: the loss is written with autograd, and ``values`` depend on ``Tokens.new``.
    """

    values: Tensor
    slope: Tensor | None
    per_sample: bool = False
    clipped: Tensor | None = None
    """bool [N]: a bound changed this token's loss."""
    out_of_range: Tensor | None = None
    """bool [N]: the ratio is out of its bounds, whether or not that changed the loss."""
