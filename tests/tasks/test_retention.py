"""Trainer states and kept versions that stay, and that go: on a disk and on S3, also when a deletion is interrupted."""

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engines.experience.files import Files
from headrace.tasks.retention import Shelf, states, versions


@pytest.fixture(params=["local", "s3"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "local":
        return Files(str(tmp_path / "store"))
    return Files(f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}")


def fill(shelf: Shelf, number: int, complete: bool = True) -> None:
    for name in ("model.safetensors", "config.json", *([shelf.marker] if complete else [])):
        shelf.files.put(f"{shelf.path(number)}/{name}", b"x")


def numbers(shelf: Shelf) -> list[int]:
    """Of all folders in which there is anything."""
    found = {path.split("/")[1] for path in shelf.files.paths(shelf.folder) if path.count("/") > 1}
    return sorted(int(name.removeprefix(shelf.prefix)) for name in found)


@pytest.mark.parametrize("make", [states, versions])
def test_the_last_the_needed_and_the_pinned_stay(files: Files, make) -> None:
    shelf = make(files)
    for number in (-2, 2, 3, 4, 6, 8, 10, 11):
        fill(shelf, number, complete=number not in (3, 11))  # 3: half deleted, or killed; 11: under way
    files.put(f"{shelf.folder}/v000002.json", b"{}")  # the record of a version
    shelf.pin(4)
    shelf.tidy(2, newest=10, needed={2})
    assert numbers(shelf) == [2, 4, 8, 10, 11]
    assert shelf.complete() == [2, 4, 8, 10]
    assert files.exists(f"{shelf.folder}/v000002.json")
    shelf.tidy(1, newest=8)
    assert numbers(shelf) == [4, 10, 11]
    shelf.tidy(1, newest=10)
    assert shelf.complete() == [4, 10]


TIDY = """
import sys
from headrace.engines.experience.files import Files
from headrace.tasks.retention import versions
from tests import kill
shelf = versions(Files(sys.argv[1]))
kill.before_change(int(sys.argv[2]))
shelf.tidy(2, 5)
"""


def test_a_deletion_killed_at_any_step_leaves_no_half_version_that_counts(tmp_path: Path) -> None:
    shelf = versions(Files(str(tmp_path)))
    for step in itertools.count():
        for number in range(1, 6):
            fill(shelf, number)
        code = subprocess.run([sys.executable, "-c", TIDY, tmp_path, str(step)], timeout=300).returncode
        for number in shelf.complete():
            assert len(list((tmp_path / shelf.path(number)).iterdir())) == 3, "a version that counts is whole"
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert set(shelf.complete()) >= {4, 5}
        shelf.tidy(2, 5)
        assert numbers(shelf) == shelf.complete() == [4, 5]
    assert step > 8, "killed at as many steps"
    assert numbers(shelf) == [4, 5]
