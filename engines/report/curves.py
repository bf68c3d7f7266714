"""The campaign as one picture."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL = "#2563eb", "#ea7317", "#2f9e44", "#d6336c", "#7048e8", "#0c8599"
STAGE_COLOURS = {
    "generate": BLUE,
    "score": ORANGE,
    "old-logprob": TEAL,
    "ref-logprob": "#66a3b5",
    "advantage": "#adb5bd",
    "train": GREEN,
    "sync-weights": PURPLE,
}
OUTSIDE = "#495057"
LONGEST_MEAN = 8
"""Iterations in a moving mean, at most; short histories have shorter ones."""
Rows = Sequence[Mapping[str, float]]


def curves_png(rows: Rows, evaluations: Mapping[int, Mapping[str, float]], title: str = "") -> bytes:
    """Six panels: reward, held-out accuracy, divergences, response length, tokens/s, seconds of each stage.

    Args:
        rows: the history: one mapping of metrics for each iteration; a metric may be missing in any of them.
        evaluations: by weight version, ``reward`` (mean over held-out problems) and ``samples``.
        title: a line above the panels; empty = none.
    """
    # The object interface: no global state of pyplot, so that any thread may draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    panels = figure.subplots(2, 3).flat
    for panel, draw in zip(panels, (_reward, _accuracy, _divergence, _length, _speed, _seconds), strict=True):
        plain(panel)
        draw(panel, rows, evaluations)
        if not panel.has_data():
            panel.text(0.5, 0.5, "no data yet", ha="center", va="center", color=GREY, transform=panel.transAxes)
            panel.set_xticks([])
            panel.set_yticks([])
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def plain(panel: "Axes") -> None:
    """Axes without what distracts."""
    from matplotlib.ticker import MaxNLocator

    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(GREY)
    panel.tick_params(colors=GREY, labelsize=9)
    panel.grid(axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def _titled(panel: "Axes", title: str, x: str = "iteration") -> None:
    panel.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    panel.set_xlabel(x, fontsize=9, color=GREY)


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric where it is there and finite."""
    found = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    return [x for x, _ in found], [y for _, y in found]


def mean_width(values: Sequence[float]) -> int:
    """Width of the moving mean of a history."""
    return min(LONGEST_MEAN, max(1, len(values) // 6))


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and the ``width - 1`` before it, as far as there are so many."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def _line(panel: "Axes", rows: Rows, name: str, colour: str, label: str = "") -> None:
    x, y = series(rows, name)
    if x:
        panel.plot(x, y, color=colour, alpha=0.3, linewidth=1, marker="o", markersize=2.5)
        panel.plot(x, moving_mean(y, mean_width(y)), color=colour, linewidth=2, label=label)


def _from_zero(panel: "Axes", rows: Rows, name: str) -> None:
    if values := series(rows, name)[1]:
        panel.set_ylim(0, max(1.0, 1.2 * max(values)))


def _legend(panel: "Axes") -> None:
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="best")


def _reward(panel: "Axes", rows: Rows, _: Mapping[int, Mapping[str, float]]) -> None:
    _titled(panel, "Reward of the samples")
    values = series(rows, "reward")[1]
    width = mean_width(values)
    _line(panel, rows, "reward", BLUE, f"mean of {width} iterations" if width > 1 else "")
    if all(0 <= value <= 1 for value in values):
        panel.set_ylim(0, 1.02)
    _legend(panel)


def _accuracy(panel: "Axes", rows: Rows, evaluations: Mapping[int, Mapping[str, float]]) -> None:
    _titled(panel, "Held-out reward, greedy", "weight version")
    versions = sorted(version for version in evaluations if "reward" in evaluations[version])
    if not versions:
        return
    values = [evaluations[version]["reward"] for version in versions]
    errors = [_standard_error(evaluations[version]) for version in versions]
    panel.errorbar(
        versions, values, yerr=errors, color=GREEN, linewidth=2, marker="o", markersize=5, capsize=3, elinewidth=1
    )
    for version, value in {versions[0]: values[0], versions[-1]: values[-1]}.items():
        above = value < 0.9
        panel.annotate(
            f"{value:.2f}",
            (version, value),
            xytext=(0, 9 if above else -9),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=9,
            color=INK,
        )
    if all(0 <= value <= 1 for value in values):
        panel.set_ylim(0, 1.02)
    panel.margins(x=0.08)


def _standard_error(evaluation: Mapping[str, float]) -> float:
    samples = evaluation.get("samples", 0.0)
    spread = evaluation.get("reward_std", 0.0)
    return spread / samples**0.5 if samples else 0.0


def _divergence(panel: "Axes", rows: Rows, _: Mapping[int, Mapping[str, float]]) -> None:
    _titled(panel, "Divergence (KL k3, nats per token)")
    for name, colour, label in (
        ("mismatch/kl_k3", ORANGE, "trainer from sampler (old, behaviour)"),
        ("policy/kl_k3", BLUE, "step (new, old)"),
        ("reference/kl_k3", PURPLE, "reference (new, reference)"),
    ):
        x, y = series(rows, name)
        # On-policy with one update, new equals old and its divergence is rounding; a logarithm of 0 is no point.
        shown = [(a, b) for a, b in zip(x, y, strict=True) if b > 1e-9]
        if shown:
            panel.plot(*zip(*shown, strict=True), color=colour, linewidth=1.6, marker="o", markersize=2, label=label)
            panel.set_yscale("log")
    _legend(panel)


def _length(panel: "Axes", rows: Rows, _: Mapping[int, Mapping[str, float]]) -> None:
    _titled(panel, "Response length (tokens)")
    _line(panel, rows, "response_length", TEAL, "mean")
    _from_zero(panel, rows, "response_length")
    cut = [
        {**row, "share": row["truncated"] / row["samples"]} for row in rows if row.get("samples") and "truncated" in row
    ]
    x, y = series(cut, "share")
    if any(y):
        right = panel.twinx()
        right.plot(x, moving_mean(y, mean_width(y)), color=RED, linewidth=1.4, linestyle="--")
        right.set_ylim(0, 1.02)
        right.spines[["top", "left", "right", "bottom"]].set_visible(False)
        right.tick_params(colors=RED, labelsize=8, length=0)
        panel.plot([], [], color=RED, linewidth=1.4, linestyle="--", label="share cut off (right)")
        _legend(panel)


def _speed(panel: "Axes", rows: Rows, _: Mapping[int, Mapping[str, float]]) -> None:
    _titled(panel, "Generation (tokens/s)")
    _line(panel, rows, "tokens_per_second", PURPLE)
    _from_zero(panel, rows, "tokens_per_second")


def _seconds(panel: "Axes", rows: Rows, _: Mapping[int, Mapping[str, float]]) -> None:
    _titled(panel, "Seconds of an iteration")
    steps = [row["step"] for row in rows]
    bottom = [0.0] * len(rows)
    parts = {f"seconds/{stage}": (stage, colour) for stage, colour in STAGE_COLOURS.items()}
    parts["overhead_seconds"] = ("outside engines", OUTSIDE)
    for name, (label, colour) in parts.items():
        values = [row.get(name, 0.0) for row in rows]
        if sum(values) > 0:
            panel.bar(steps, values, bottom=bottom, width=1.0, color=colour, label=label, linewidth=0)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    if any(bottom):
        panel.set_ylim(top=1.35 * max(bottom))
        panel.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=3, loc="upper left", columnspacing=1.0)
