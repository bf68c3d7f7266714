"""How jobs reach the ranks, and how their failures come back: two ranks as two threads on one store."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from headrace.engines.model import crew
from headrace.engines.model.crew import Crew, RankFailed, Unasked
from headrace.engines.model.gang import Gang

Run = Callable[..., dict[str, Any]]


class Left(BaseException):
    """What a rank raises here instead of ending the process."""


@pytest.fixture
def pair(gang: Gang) -> Callable[[Run, Run], tuple[Crew, threading.Thread]]:
    """``pair(run0, run1)``: the crew of rank 0, and the thread in which rank 1 follows."""

    def make(first: Run, second: Run) -> tuple[Crew, threading.Thread]:
        store = HashStore()
        crews = [
            Crew(Gang(rank, 2, torch.device("cpu"), gang.mesh, store), run, deadline_s=5)
            for rank, run in enumerate((first, second))
        ]
        thread = threading.Thread(target=crews[1].follow, daemon=True)
        thread.start()
        return crews[0], thread

    return make


def answer(method: str, params: dict[str, Any], asked: Any) -> dict[str, Any]:
    return {"method": method, **params}


def refuse(method: str, params: dict[str, Any], asked: Any) -> dict[str, Any]:
    if method == "bad":
        raise ValueError("no such thing")
    return answer(method, params, asked)


def test_jobs_reach_all_ranks_and_the_gang_can_be_dismissed(pair) -> None:
    seen: list[str] = []
    first, thread = pair(answer, lambda method, params, _: seen.append(method) or {})
    assert first.run("one", {"x": 1}, Unasked()) == {"method": "one", "x": 1}
    assert first.run("two", {}, Unasked()) == {"method": "two"}
    assert seen == ["one", "two"]
    assert first.dismiss(1)
    thread.join(5)
    assert not thread.is_alive()


def test_an_error_of_all_ranks_is_the_jobs_error_and_work_goes_on(pair) -> None:
    first, _ = pair(refuse, refuse)
    with pytest.raises(ValueError, match="no such thing"):
        first.run("bad", {}, Unasked())
    assert first.run("good", {}, Unasked()) == {"method": "good"}


def test_an_error_of_another_rank_names_it(pair) -> None:
    first, _ = pair(answer, refuse)
    with pytest.raises(RankFailed, match="rank 1: ValueError: no such thing"):
        first.run("bad", {}, Unasked())
    assert first.run("good", {}, Unasked()) == {"method": "good"}


def test_a_rank_that_fails_while_the_other_is_stuck_ends_its_process(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Left

    stuck = threading.Event()
    monkeypatch.setattr(crew, "GRACE_S", 0.3)
    monkeypatch.setattr(crew.os, "_exit", leave)
    first, _ = pair(refuse, lambda method, params, _: {"went on": stuck.wait(5)})
    with pytest.raises(Left):
        first.run("bad", {}, Unasked())
    stuck.set()
