"""Rooms keep to their walls: what may import what, and what may not need torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "blocks": set(),
    "algorithms": {"blocks"},
    "engines": {"algorithms", "blocks"},
    "tasks": {"engines", "blocks"},
    "flows": {"tasks", "engines", "blocks"},
}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_between_rooms_go_one_way(room):
    for path in (ROOT / room).rglob("*.py"):
        used = {name.split(".")[1] for name in _imports(path) if name.startswith("headrace.")}
        assert used <= MAY_IMPORT[room] | {room, "__version__"}, path


def test_flows_tasks_and_blocks_import_without_torch():
    modules = [
        f"headrace.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
        for room in ("flows", "tasks", "blocks")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "__init__.py"
    ]
    block = "import sys; sys.modules['torch'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", block + "".join(f"import {m}\n" for m in modules)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_file_is_longer_than_500_lines():
    long = [p for room in (*MAY_IMPORT, "deployments", "benchmarks") for p in (ROOT / room).rglob("*.py")]
    assert not [p for p in long if len(p.read_text().splitlines()) > 500]
