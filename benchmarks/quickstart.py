"""The quickstart on five seeds: ``python -m benchmarks.quickstart [--seeds 0 1 2 3 4]``.

Each seed is the whole product in a home of its own: ``headrace up``, the recipe ``quickstart`` as it ships with only
the seed changed, held-out answers before and after, ``headrace down``. Bounds: greedy accuracy on the held-out
problems, none of which is trained on, at least 0.8 for every seed; at most six minutes from ``up`` to the summary.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.stacks import stack
from headrace.blocks.home import model_folder
from headrace.engines.experience.store import Store
from headrace.engines.report import History

ACCURACY = 0.8
SECONDS = 360.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    results = [campaign(seed) for seed in parser.parse_args().seeds]
    print("seed  before  after  seconds  s/iteration  outside engines")
    for line in results:
        print(
            "{seed:4d}  {before:6.3f}  {after:5.3f}  {seconds:7.0f}  {iteration:11.2f}  {overhead:15.2f}".format(**line)
        )
    worst, longest = min(r["after"] for r in results), max(r["seconds"] for r in results)
    print(f"lowest accuracy {worst:.3f} (bound {ACCURACY}), longest {longest:.0f} s (bound {SECONDS:.0f})")
    raise SystemExit(worst < ACCURACY or longest > SECONDS)


def campaign(seed: int) -> dict[str, float]:
    """One whole quickstart."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        began = time.monotonic()
        with stack(home) as headrace:
            model = model_folder("smollm2-135m-instruct")
            headrace("run", "quickstart", "--set", f"seed={seed}", "--set", f"model.path={model}")
            seconds = time.monotonic() - began
        store = Store(str(home / "store" / "quickstart"))
        summary, rows = json.loads(store.get("summary.json")), History(store).rows()
    return {
        "seed": seed,
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "seconds": seconds,
        "iteration": sum(row["iteration_seconds"] for row in rows) / len(rows),
        "overhead": sum(row["overhead_seconds"] for row in rows) / len(rows),
    }


if __name__ == "__main__":
    main()
