"""What a model engine refuses, and how it says so."""


class ModelEngineError(Exception):
    """Base of this room's errors."""


class UnsupportedModel(ModelEngineError, ValueError):
    """The folder holds no model, or one that this back end would compute wrongly."""


class BadBatch(ModelEngineError, ValueError):
    """Experience that cannot be packed or trained: a missing column, an empty prompt, lengths that differ."""


class StepRefused(ModelEngineError):
    """The engine is not at the step that it was asked to do; its state has to be restored first."""


class OffPolicy(ModelEngineError):
    """The first minibatch of an on-policy step has a ratio new/old that is not 1: 'old' is of other weights."""


class BadState(ModelEngineError):
    """A folder of trainer state is incomplete, or belongs to another model."""
