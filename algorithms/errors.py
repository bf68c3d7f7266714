"""The one error of this package."""


class AlgorithmError(ValueError):
    """Inputs that no defined result belongs to: wrong shapes, a missing input, an unknown name."""
