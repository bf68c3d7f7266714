"""A package of reward functions that misbehave, installed as a user would install one."""

import os
from pathlib import Path

import pytest

CODE = """
import ctypes, os, subprocess, sys, time

def by_text(text, ground_truth, *, messages=None):
    if text == "raise":
        raise KeyError("no such thing")
    if text == "hang":
        while True:
            pass
    if text == "sleep with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(ground_truth, "w") as f:
            f.write(str(child.pid))
        time.sleep(600)
    if text == "exit":
        print("my last words", flush=True)
        os._exit(5)
    if text == "sys.exit":
        sys.exit("leaving")
    if text == "segfault":
        ctypes.string_at(0)
    if text == "print":
        print("x" * 2_000_000)
        sys.stdin.read()
    if text == "pid":
        return os.getpid()
    results = {"nan": float("nan"), "inf": float("inf"), "huge": 1e300, "none": None, "text": "0.5", "list": [1.0],
               "true": True, "parts": {"a": 0.25, "b": 0.5}, "bad part": {"a": 1.0, "b": "x"}}
    return results.get(text, 1.0)

def roles(text, ground_truth, *, messages=None):
    return float(len(messages or []))

def no_messages(text, ground_truth):
    return 0.0
"""
ENTRY_POINTS = """[headrace.rewards]
by_text = misbehaving:by_text
roles = misbehaving:roles
no_messages = misbehaving:no_messages
broken = not_there:reward
"""


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the package for the scoring processes that this test starts."""
    site = tmp_path / "site"
    info = site / "misbehaving-1.0.dist-info"
    info.mkdir(parents=True)
    site.joinpath("misbehaving.py").write_text(CODE)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    return site
