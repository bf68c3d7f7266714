"""The parity gate for people: a table of its figures, a table of the ablation, one picture. Without torch."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.engines.report.curves import BLUE, GREEN, GREY, INK, ORANGE, RED, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = (
    ("mismatch/mean", "mean_ratio", "mean ratio old/behaviour"),
    ("mismatch/kl_k1", "kl_k1", "KL by k1 (nats/token)"),
    ("mismatch/kl_k3", "kl_k3", "KL(behaviour ‖ old) by k3 (nats/token)"),
    ("mismatch/p999_abs_log_ratio", "p999_abs_log_ratio", "99.9th percentile of |Δ log p|"),
    ("mismatch/max_abs_log_ratio", "max_abs_log_ratio", "largest |Δ log p|"),
    ("mismatch/ess", "ess", "effective sample size"),
    ("mismatch/clip_fraction", "clip_fraction", "share out of the loss's clip bounds"),
    ("behaviour/entropy", "", "entropy, rollout engine (estimated)"),
    ("old/entropy", "", "entropy, trainer"),
    ("behaviour/bfloat16_share", "", "logits on a bfloat16 grid, rollout engine"),
    ("old/bfloat16_share", "", "logits on a bfloat16 grid, trainer"),
    ("fork_pairs", "", "pairs that show that grid"),
    ("tokens", "", "tokens"),
)
"""Metric, name of its bound (empty = none), words."""
BIN_LABELS = ("1e-6", "1e-5", "1e-4", "1e-3", "3e-3", "0.01", "0.03", "0.1", "0.3", "1", "3", "more")
"""Upper ends of the histogram's bins (``algorithms.parity.EDGES``)."""
COLOURS = {"changed": ORANGE, "own": BLUE}
WORDS = {"changed": "changed weights", "own": "the campaign's weights"}
Rows = Sequence[Mapping[str, Any]]


def parity_table(rounds: Rows, bounds: Mapping[str, float]) -> list[dict[str, object]]:
    """One line for each figure, with its bound and a column for each round (weights, engine, metrics)."""
    lines = []
    for metric, bound, words in FIGURES:
        line: dict[str, object] = {"figure": words, "bound": _bound(bound, bounds)}
        for r in rounds:
            name = WORDS[r["weights"]] + (f", rollout-{r['engine']}" if len(rounds) > 2 else "")
            line[name] = readable(r["metrics"].get(metric))
        lines.append(line)
    return lines


def ablation_table(rounds: Rows, trials: Rows) -> list[dict[str, object]]:
    """One line for the recipe as it is, then one for each setting (setting, now, tried, note, rounds)."""
    lines = [_trial("as the recipe says", "", "", rounds, "")]
    return lines + [_trial(t["setting"], t["now"], t["tried"], t["rounds"], t["note"]) for t in trials]


def _trial(setting: str, now: object, tried: object, rounds: Rows, note: str) -> dict[str, object]:
    line: dict[str, object] = {"setting": setting, "now": str(now), "tried": str(tried)}
    for weights, words in WORDS.items():
        metrics = [r["metrics"] for r in rounds if r["weights"] == weights]
        for metric, short in (("mismatch/kl_k3", "KL"), ("mismatch/max_abs_log_ratio", "largest |Δ|")):
            values = [m[metric] for m in metrics if metric in m]
            line[f"{short}, {words}"] = readable(max(values)) if values else ""
    verdict = "within all bounds" if all(r["ok"] for r in rounds) else "beyond a bound"
    return line | {"result": verdict if rounds else note}


def _bound(name: str, bounds: Mapping[str, float]) -> str:
    if name not in bounds:
        return ""
    return {"mean_ratio": f"1 ± {bounds[name]:g}", "ess": f"≥ {bounds[name]:g}"}.get(name, f"≤ {bounds[name]:g}")


def readable(value: float | None) -> str:
    """Four digits, nothing for None."""
    return "" if value is None else f"{value:.4g}"


def parity_png(rounds: Rows, bounds: Mapping[str, float], trials: Rows) -> bytes:
    """How large the differences are, where in the answer, at which tokens; and, where there was one, the ablation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4 if trials else 3.4), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 if trials else 1, 3)
    panels = [figure.add_subplot(grid[0, column]) for column in range(3)]
    for panel, draw in zip(panels, (_sizes, _places, _classes), strict=True):
        plain(panel)
        draw(panel, rounds)
    panels[0].legend(frameon=False, fontsize=8.5, labelcolor=INK)
    if trials:
        panel = figure.add_subplot(grid[1, :])
        plain(panel)
        _trials(panel, rounds, bounds, trials)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _title(panel: "Axes", title: str, x: str) -> None:
    panel.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    panel.set_xlabel(x, fontsize=9, color=GREY)


def _merged(rounds: Rows, table: str, label: str) -> dict[str, dict[Any, tuple[float, float]]]:
    """By weights, then by label: (mean |Δ|, tokens), over all engines."""
    found: dict[str, dict[Any, tuple[float, float]]] = {}
    for r in rounds:
        for row in r["tables"][table]:
            mean, tokens = found.setdefault(r["weights"], {}).get(row[label], (0.0, 0.0))
            both = tokens + row["tokens"]
            found[r["weights"]][row[label]] = ((mean * tokens + row["mean_abs"] * row["tokens"]) / both, both)
    return found


def _bars(panel: "Axes", labels: Sequence[str], heights: Mapping[str, Sequence[float]]) -> None:
    width = 0.8 / max(1, len(heights))
    for place, (weights, values) in enumerate(heights.items()):
        at = [x + (place - (len(heights) - 1) / 2) * width for x in range(len(labels))]
        panel.bar(at, values, width=width, color=COLOURS[weights], label=WORDS[weights])
    panel.set_xticks(range(len(labels)), labels)


def _sizes(panel: "Axes", rounds: Rows) -> None:
    _title(panel, "Tokens by |log(old / behaviour)|", "up to (nats)")
    shares: dict[str, list[float]] = {}
    for r in rounds:
        counts = [sum(pair) for pair in zip(shares.get(r["weights"], [0] * 12), r["tables"]["histogram"], strict=True)]
        shares[r["weights"]] = counts
    _bars(panel, BIN_LABELS, {w: [n / max(1, sum(counts)) for n in counts] for w, counts in shares.items()})
    panel.tick_params(axis="x", labelsize=7)


def _places(panel: "Axes", rounds: Rows) -> None:
    _title(panel, "Mean |log(old / behaviour)| by place", "token of the answer, from")
    merged = _merged(rounds, "positions", "from")
    places = sorted({place for rows in merged.values() for place in rows})
    _bars(panel, [str(p) for p in places], {w: [rows.get(p, (0, 0))[0] for p in places] for w, rows in merged.items()})


def _classes(panel: "Axes", rounds: Rows) -> None:
    _title(panel, "… by kind of token", "")
    merged = _merged(rounds, "classes", "class")
    kinds = sorted({kind for rows in merged.values() for kind in rows})
    _bars(panel, kinds, {w: [rows.get(k, (0, 0))[0] for k in kinds] for w, rows in merged.items()})
    panel.tick_params(axis="x", labelsize=8)


def _trials(panel: "Axes", rounds: Rows, bounds: Mapping[str, float], trials: Rows) -> None:
    _title(panel, "KL(behaviour ‖ old), one setting changed at a time", "worst round, nats per token")
    ran = [t for t in trials if t["rounds"]]
    bars = [("as the recipe says", rounds), *((f"{t['setting']} = {t['tried']}", t["rounds"]) for t in ran)]
    worst = [max(max(abs(r["metrics"]["mismatch/kl_k3"]) for r in rs), 1e-9) for _, rs in bars]
    good = [all(r["ok"] for r in rs) for _, rs in bars]
    panel.barh(range(len(bars)), worst, color=[GREEN if ok else RED for ok in good], height=0.6)
    panel.set_yticks(range(len(bars)), [name for name, _ in bars], color=INK)
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.axvline(bounds["kl_k3"], color=GREY, linestyle="--", linewidth=1.2)
    panel.annotate(
        "bound", (bounds["kl_k3"], -0.45), color=GREY, fontsize=8.5, xytext=(3, 0), textcoords="offset points"
    )
    panel.grid(axis="y", visible=False)
