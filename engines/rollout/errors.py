"""What can go wrong in a rollout engine, apart from weights (``engines/checkpoint/errors.py``)."""


class RolloutError(RuntimeError):
    """Base of the errors of rollout engines."""


class UnsupportedModel(RolloutError, ValueError):
    """The model folder is missing, incomplete, or of an architecture that the back end does not decode."""


class NotServing(RolloutError):
    """The engine has no complete weights: the last load failed. Load a version, then generate."""


class RequestTooLong(RolloutError, ValueError):
    """Prompt and response do not fit into the engine's context."""


class WrongVersion(RolloutError):
    """The engine serves another weight version than the stage asked for."""


class NoChatTemplate(RolloutError, ValueError):
    """The tokenizer cannot render chat messages."""


class EngineDied(RolloutError):
    """The engine's child process ended or stopped answering; the message has the end of its log."""
