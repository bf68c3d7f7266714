"""What can go wrong between a stage and its engine; each kind asks for another reaction."""


class EngineError(Exception):
    """Base of everything that a call to an engine raises."""


class EngineLost(EngineError, ConnectionError):
    """The engine process is gone, unreachable, or another one answers in its place. Start it again and retry."""


class JobFailed(EngineError):
    """The engine ran the job and raised. Retrying helps only if the cause was passing.

    Attributes:
        kind: name of the class of what was raised there; empty when the engine refused the job itself.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class JobCancelled(EngineError):
    """The job was cancelled on the engine's side."""


class JobDeadline(EngineError, TimeoutError):
    """The job did not finish in time; it was cancelled on the engine."""


class Fenced(EngineError):
    """A newer attempt of the campaign has taken the engine over; this attempt must stop."""
