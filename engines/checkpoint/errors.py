"""What can go wrong between two ends of a weight transfer."""


class WeightError(RuntimeError):
    """Weights could not be published, pulled or believed. After it the receiver must not serve what it half loaded.

    The message names what is known of version, receiver's rank and partition, and ends with what to try.
    """

    def __init__(
        self,
        what: str,
        *,
        version: int | None = None,
        rank: int | None = None,
        partition: int | None = None,
        advice: str = "",
    ) -> None:
        self.what, self.version, self.rank, self.partition, self.advice = what, version, rank, partition, advice
        named = {"weight version": version, "rank": rank, "partition": partition}
        where = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        super().__init__((f"{where}: " if where else "") + what + (f". Try: {advice}" if advice else ""))

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.version, self.rank, self.partition, self.advice)


class VersionExists(WeightError):
    """The version was committed before, with other content; a committed version never changes."""


def _rebuild(
    kind: type[WeightError], what: str, version: int | None, rank: int | None, partition: int | None, advice: str
) -> WeightError:
    return kind(what, version=version, rank=rank, partition=partition, advice=advice)
