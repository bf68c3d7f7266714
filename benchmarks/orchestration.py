"""What Headrace and Prefect add to an iteration, and what importing them costs.

``python -m benchmarks.orchestration [--iterations 8]`` runs the quickstart's iterations on a stack of its own and
reports the seconds of each in which no engine and no scoring process worked; then compares import times, and checks
that the flows import without torch. Needs the quickstart's model (``make model``). Exits with status 1 when
a bound is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.stacks import stack
from headrace.blocks.home import model_folder
from headrace.engines.experience.store import Store
from headrace.engines.report import History

OVERHEAD_S = 0.5
IMPORT_RATIO = 1.5
IMPORT_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        overheads = measure_overhead(Path(scratch), given.iterations)
    ours, prefects = import_seconds("headrace.flows.on_policy"), import_seconds("prefect")
    clean = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, headrace.flows.on_policy, headrace.flows.engine_host; sys.exit('torch' in sys.modules)",
        ],
        check=False,
    ).returncode
    overhead, ratio = statistics.median(overheads), ours / prefects
    print(json.dumps({"overhead_s": [round(o, 3) for o in overheads]}))
    print(f"overhead of an iteration, median: {overhead:.3f} s (bound {OVERHEAD_S})")
    print(f"import headrace.flows / import prefect: {ratio:.2f} (bound {IMPORT_RATIO}); torch imported: {bool(clean)}")
    raise SystemExit(overhead > OVERHEAD_S or ratio > IMPORT_RATIO or bool(clean))


def measure_overhead(scratch: Path, iterations: int) -> list[float]:
    """Overhead of each iteration but the first, seconds."""
    settings = [
        f"iterations={iterations}",
        "evaluate.problems=0",
        f"model.path={model_folder('smollm2-135m-instruct')}",
    ]
    with stack(scratch / "home") as headrace:
        headrace("run", "quickstart", *(word for setting in settings for word in ("--set", setting)))
    rows = History(Store(str(scratch / "home" / "store" / "quickstart"))).rows()
    return [row["overhead_seconds"] for row in rows[1:]]


def import_seconds(module: str) -> float:
    """Best of several imports, each in a process of its own."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(IMPORT_ROUNDS)
    ]
    return min(float(run.stdout) for run in runs)


if __name__ == "__main__":
    main()
