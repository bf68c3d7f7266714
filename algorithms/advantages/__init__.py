"""From rewards to advantages: reject, then baseline; computed once over the whole global batch.

Each module of this package registers its estimators: to add one, add a file. Another package adds one through the entry
point group ``headrace.advantages``.
"""

from headrace.algorithms.advantages.data import Advantages, Samples
from headrace.algorithms.advantages.registry import Estimate, Estimator, estimator
from headrace.algorithms.advantages.stage import advantages
from headrace.algorithms.losses.registry import load_modules

load_modules(__name__, __path__)

__all__ = ["Advantages", "Estimate", "Estimator", "Samples", "advantages", "estimator"]
