"""What can be wrong with a reward before anything is scored."""


class RewardError(RuntimeError):
    """A reward that cannot be used; the message says what to change. One failed sample is a Score, never this."""
