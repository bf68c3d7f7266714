"""The ledger: what became of every group, as small immutable files below ``ledger/`` of the store.

One file for each event, step and shard. Writing the same event again is allowed and changes nothing; writing another
content for it is an error. So whatever is killed, and whenever, the same work can simply be done again.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.engines.experience.store import Store

EVENTS = ("reserved", "committed", "trained", "dropped")


class LedgerError(RuntimeError):
    """Groups were lost, trained twice, or recorded in two ways."""


class Frontier(NamedTuple):
    """Where a campaign stands."""

    step: int
    """The next step to train."""
    cursor: int
    """The data cursor after the last trained step; 0 before the first."""


class Summary(NamedTuple):
    """Counts over the whole campaign."""

    frontier: Frontier
    reserved: int
    committed: int
    trained: int
    dropped: int
    open: int
    """Groups that are reserved, and neither trained nor dropped yet."""
    reasons: dict[str, int]
    """Dropped groups by reason."""


class Ledger:
    """Safe to use from several processes: no file is ever changed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def reserve(self, step: int, group_ids: Sequence[int], cursor: int, round: int = 0) -> None:
        """The groups that a round of a step takes, and the data cursor after them. Raises LedgerError, StoreError."""
        self._write("reserved", step, round, {"groups": list(group_ids), "cursor": cursor})

    def committed(self, step: int, shard: int, group_ids: Sequence[int], key: str) -> None:
        """The groups whose samples are in the store under the manifest key. Raises LedgerError, StoreError."""
        self._write("committed", step, shard, {"groups": list(group_ids), "key": key})

    def trained(self, step: int, group_ids: Sequence[int], key: str) -> None:
        """The groups that the optimizer has seen; finishes the step. Raises LedgerError, StoreError."""
        self._write("trained", step, 0, {"groups": list(group_ids), "key": key})

    def dropped(self, step: int, reasons: Mapping[int, str], key: str) -> None:
        """The groups of a step that are not trained: group id → why. Raises LedgerError, StoreError."""
        groups = {str(group): reasons[group] for group in sorted(reasons)}
        self._write("dropped", step, 0, {"groups": groups, "key": key})

    def frontier(self) -> Frontier:
        """The next step to train, and the data cursor after the last trained one. Raises LedgerError, StoreError."""
        return self._frontier(self._store.paths("ledger"))

    def state(self) -> Summary:
        """Counts. Raises LedgerError, StoreError."""
        events = self._read()
        groups = {kind: Counter[int]() for kind in EVENTS}
        reasons = Counter[str]()
        for (kind, _, _), content in events.items():
            groups[kind].update(int(group) for group in content["groups"])
            if kind == "dropped":
                reasons.update(content["groups"].values())
        settled = groups["trained"].keys() | groups["dropped"].keys()
        return Summary(
            frontier=self._frontier([_path(*event) for event in events]),
            reserved=groups["reserved"].total(),
            committed=groups["committed"].total(),
            trained=groups["trained"].total(),
            dropped=groups["dropped"].total(),
            open=len(groups["reserved"].keys() - settled),
            reasons=dict(reasons),
        )

    def verify(self) -> None:
        """Raises LedgerError, with all that is wrong, unless every group went its way exactly once."""
        steps: dict[str, dict[int, list[int]]] = {kind: {} for kind in EVENTS}
        finished = set[int]()
        for (kind, step, _), content in self._read().items():
            if kind == "trained":
                finished.add(step)
            for group in content["groups"]:
                steps[kind].setdefault(int(group), []).append(step)
        wrong: list[str] = []
        for kind in EVENTS:
            for group, where in steps[kind].items():
                if len(where) > 1:
                    wrong.append(f"group {group} is {kind} {len(where)} times, in steps {sorted(where)}")
        reserved, committed, trained, dropped = (steps[kind] for kind in EVENTS)
        for group, (step, *_) in sorted(trained.items()):
            if group not in committed:
                wrong.append(f"group {group} is trained in step {step} and was never committed")
            if group in dropped:
                wrong.append(f"group {group} is trained in step {step} and dropped in step {dropped[group][0]}")
        for kind, groups in (("committed", committed), ("trained", trained), ("dropped", dropped)):
            wrong += [f"group {group} is {kind} and was never reserved" for group in sorted(groups.keys() - reserved)]
        for group, (step, *_) in sorted(reserved.items()):
            if step in finished and group not in trained and group not in dropped:
                wrong.append(f"group {group} is lost: step {step} is finished and neither trained nor dropped it")
        if finished and len(finished) != max(finished) - min(finished) + 1:
            gaps = set(range(min(finished), max(finished))) - finished
            wrong.append(f"steps {sorted(gaps)} were never trained, later ones were")
        if wrong:
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise LedgerError(f"the ledger of {self._store.url} is broken: {'; '.join(wrong[:10])}{more}")

    def _frontier(self, paths: Sequence[str]) -> Frontier:
        finished = [step for kind, step, _ in map(_event, paths) if kind == "trained"]
        if not finished:
            return Frontier(0, 0)
        last = max(finished)
        rounds = [event for event in map(_event, paths) if event[:2] == ("reserved", last)]
        if not rounds:
            raise LedgerError(f"step {last} is trained and nothing in {self._store.url}/ledger was reserved for it")
        return Frontier(last + 1, json.loads(self._store.get(_path(*max(rounds))))["cursor"])

    def _read(self) -> dict[tuple[str, int, int], dict[str, Any]]:
        paths = self._store.paths("ledger")
        return {_event(path): json.loads(data) for path, data in zip(paths, self._store.get_many(paths), strict=True)}

    def _write(self, kind: str, step: int, shard: int, content: dict[str, Any]) -> None:
        groups = content["groups"]
        if len(set(groups)) != len(groups):
            raise LedgerError(f"a group occurs twice among those {kind} in step {step}")
        path, data = _path(kind, step, shard), json.dumps(content, separators=(",", ":")).encode()
        if not self._store.create(path, data) and (earlier := self._store.get(path)) != data:
            raise LedgerError(
                f"step {step}, shard {shard} was {kind} before, with other content ({self._store.url}/{path} has "
                f"{earlier[:200].decode()}, now {data[:200].decode()}). If data, recipe or shards were changed on "
                "purpose, start another campaign"
            )


def _path(kind: str, step: int, shard: int) -> str:
    return f"ledger/{step:06d}/{kind}-{shard:04d}.json"


def _event(path: str) -> tuple[str, int, int]:
    _, step, name = path.split("/")
    kind, _, shard = name.removesuffix(".json").partition("-")
    return kind, int(step), int(shard)
