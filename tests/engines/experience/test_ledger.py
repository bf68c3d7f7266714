"""Every group is in the ledger exactly once, whatever is killed and whenever."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.experience.ledger import Frontier, Ledger, LedgerError, Summary
from headrace.engines.experience.store import Store


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(Store(str(tmp_path)))


def train(ledger: Ledger, step: int, groups: list[int], dropped: tuple[int, ...] = ()) -> None:
    """One whole iteration in two shards."""
    ledger.reserve(step, groups, groups[-1] + 1)
    half = len(groups) // 2
    ledger.committed(step, 0, groups[:half], f"g{step}0")
    ledger.committed(step, 1, groups[half:], f"g{step}1")
    if dropped:
        ledger.dropped(step, {group: "no reward" for group in dropped}, f"a{step}")
    ledger.trained(step, [group for group in groups if group not in dropped], f"t{step}")


def test_a_campaign_in_numbers(ledger: Ledger) -> None:
    assert ledger.frontier() == Frontier(0, 0)
    train(ledger, 0, [0, 1, 2, 3])
    train(ledger, 1, [4, 5, 6, 7], dropped=(5,))
    ledger.reserve(2, [8, 9], 10)
    ledger.committed(2, 0, [8], "g20")
    ledger.verify()
    assert ledger.frontier() == Frontier(2, 8)
    assert ledger.state() == Summary(
        Frontier(2, 8), reserved=10, committed=9, trained=7, dropped=1, open=2, reasons={"no reward": 1}
    )


def test_the_same_event_twice_changes_nothing(ledger: Ledger) -> None:
    train(ledger, 0, [0, 1], dropped=(1,))
    before = ledger.state()
    train(ledger, 0, [0, 1], dropped=(1,))
    assert ledger.state() == before
    ledger.verify()


def test_another_content_for_an_event_is_refused(ledger: Ledger) -> None:
    ledger.reserve(0, [0, 1], 2)
    with pytest.raises(
        LedgerError, match=r"step 0, shard 0 was reserved before, with other content.*start another campaign"
    ):
        ledger.reserve(0, [0, 2], 3)
    with pytest.raises(LedgerError, match="a group occurs twice among those committed in step 0"):
        ledger.committed(0, 0, [1, 1], "k")


def test_every_break_is_named(ledger: Ledger) -> None:
    ledger.reserve(0, [0, 1, 2, 3], 4)
    ledger.committed(0, 0, [0, 1], "g")
    ledger.dropped(0, {1: "late"}, "a")
    ledger.trained(0, [0, 1, 2, 9], "t")
    ledger.reserve(2, [4, 3], 5)
    ledger.committed(2, 0, [4], "g")
    ledger.trained(2, [0, 4], "t")
    with pytest.raises(LedgerError) as caught:
        ledger.verify()
    for part in (
        "group 0 is trained 2 times, in steps [0, 2]",
        "group 1 is trained in step 0 and dropped in step 0",
        "group 2 is trained in step 0 and was never committed",
        "group 9 is trained and was never reserved",
        "group 3 is reserved 2 times, in steps [0, 2]",
        "group 3 is lost: step 0 is finished and neither trained nor dropped it",
        "steps [1] were never trained, later ones were",
    ):
        assert part in str(caught.value)


def test_a_trained_step_without_reservation_has_no_cursor(ledger: Ledger) -> None:
    ledger.trained(3, [], "t")
    with pytest.raises(LedgerError, match=r"step 3 is trained and nothing in .*/ledger was reserved for it"):
        ledger.frontier()


def test_a_step_whose_groups_were_all_dropped_is_finished(ledger: Ledger) -> None:
    train(ledger, 0, [0, 1], dropped=(0, 1))
    ledger.verify()
    assert ledger.frontier() == Frontier(1, 2)


def events(steps: int, size: int, drops: set[int]) -> list[tuple[str, tuple]]:
    """A campaign as the calls that it makes, in order."""
    calls: list[tuple[str, tuple]] = []
    for step in range(steps):
        groups = list(range(step * size, (step + 1) * size))
        dropped = {group: "r" for group in groups if group in drops}
        calls.append(("reserve", (step, groups, groups[-1] + 1)))
        calls += [("committed", (step, shard, [group], f"g{group}")) for shard, group in enumerate(groups)]
        if dropped:
            calls.append(("dropped", (step, dropped, f"a{step}")))
        calls.append(("trained", (step, [group for group in groups if group not in dropped], f"t{step}")))
    return calls


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 15)), st.lists(st.integers(0, 40), max_size=4))
def test_restarts_anywhere_give_the_undisturbed_ledger(
    steps: int, size: int, drops: set[int], kills: list[int]
) -> None:
    calls = events(steps, size, drops)
    disturbed, calm = in_memory(), in_memory()
    for count in [*kills, len(calls)]:  # each attempt starts anew at its frontier and is killed after some calls
        ledger = Ledger(disturbed)
        frontier = ledger.frontier()
        todo = [call for call in calls if call[1][0] >= frontier.step]
        assert frontier.cursor == frontier.step * size
        for name, arguments in todo[:count]:
            getattr(ledger, name)(*arguments)
        ledger.verify()
    for name, arguments in calls:
        getattr(Ledger(calm), name)(*arguments)
    assert contents(disturbed) == contents(calm)
    assert Ledger(disturbed).state().trained == steps * size - len(drops & set(range(steps * size)))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 3), st.integers(1, 3), st.data())
def test_any_lost_or_doubled_group_breaks_it(steps: int, size: int, data: st.DataObject) -> None:
    store = in_memory()
    ledger = Ledger(store)
    for name, arguments in events(steps, size, set()):
        getattr(ledger, name)(*arguments)
    ledger.verify()
    step = data.draw(st.integers(0, steps - 1))
    kind = data.draw(st.sampled_from(["reserved", "committed", "trained"]))
    path = f"ledger/{step:06d}/{kind}-0000.json"
    content = json.loads(store.get(path))
    if data.draw(st.booleans()):
        content["groups"].pop()
    else:
        content["groups"].append(((step + 1) % steps) * size)  # a group of another step
    store.put(path, json.dumps(content).encode())
    with pytest.raises(LedgerError):
        ledger.verify()


def in_memory() -> Store:
    return Store(f"memory://{uuid.uuid4()}")


def contents(store: Store) -> dict[str, bytes]:
    return {path: store.get(path) for path in store.paths("ledger")}


ENDLESS = """
import sys
from headrace.engines.experience.ledger import Ledger
from headrace.engines.experience.store import Store
ledger = Ledger(Store(sys.argv[1]))
step = ledger.frontier().step
while True:
    groups = list(range(step * 4, step * 4 + 4))
    ledger.reserve(step, groups, groups[-1] + 1)
    ledger.committed(step, 0, groups, f"g{step}")
    ledger.trained(step, groups, f"t{step}")
    print(step, flush=True)
    step += 1
"""


def test_kill_9_of_the_writer_breaks_nothing(tmp_path: Path) -> None:
    reached = -1
    for more in (1, 3, 6):
        run = subprocess.Popen([sys.executable, "-c", ENDLESS, tmp_path], stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        for line in run.stdout:
            if int(line) >= reached + more:
                break
        os.kill(run.pid, signal.SIGKILL)
        run.wait(10)
        run.stdout.close()
        ledger = Ledger(Store(str(tmp_path)))
        ledger.verify()
        assert ledger.frontier().step > reached + more
        reached = ledger.frontier().step - 1
        assert ledger.frontier().cursor == 4 * (reached + 1)


def test_on_s3(s3_bucket: str) -> None:
    ledger = Ledger(Store(f"{s3_bucket}/ledger-test"))
    train(ledger, 0, [0, 1, 2], dropped=(1,))
    train(ledger, 0, [0, 1, 2], dropped=(1,))
    ledger.verify()
    assert ledger.frontier() == Frontier(1, 3)
    with pytest.raises(LedgerError, match="with other content"):
        ledger.reserve(0, [5], 6)
