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


class MissingPackage(RolloutError):
    """The interpreter of the engine's environment lacks the engine."""


class UnsupportedEngine(RolloutError):
    """The engine that is installed lacks something that its back end needs."""


class ModelDoesNotFit(EngineDied):
    """The engine ended while it started, for want of memory."""


class PortTaken(RolloutError):
    """Another program listens on the port that the recipe names."""


class WrongLogprobs(RolloutError):
    """The engine's log-probabilities are not those of the tokens that it sampled: nothing of it can be trained on."""


_NO_ROOM = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "less than desired GPU memory utilization",
    "Not enough memory",
    "Cannot allocate memory",
    "DefaultCPUAllocator: can't allocate memory",
)
"""What engines log when memory is short; from their sources and from runs."""


def does_not_fit(log: str) -> str:
    """What to do when the end of an engine's log says that memory was short; '' when it does not."""
    if not any(sign in log for sign in _NO_ROOM):
        return ""
    return (
        "The model and its cache do not fit into memory: lower max_model_len or max_num_seqs, change "
        "gpu_memory_utilization (kv_cache_memory_bytes on CPUs), give the engine more GPUs, or take a smaller model."
    )
