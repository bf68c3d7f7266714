"""The table of one iteration: where its time went."""

from collections.abc import Mapping

ORDER = ("generate", "score", "old-logprob", "ref-logprob", "value", "advantage", "train", "sync-weights", "checkpoint")
FORWARD = ("old-logprob", "ref-logprob", "value", "train")
"""Stages that compute prompt and response tokens alike."""


def stage_table(row: Mapping[str, float], attempts: Mapping[str, int]) -> list[dict[str, object]]:
    """One dict for each stage of an iteration, for a table of people; then what no engine worked in, then the whole.

    Args:
        row: metrics of the iteration: ``seconds/<stage>``, ``tokens``, ``prompt_tokens``, ``weight_bytes``,
            ``policy_lag``, ``iteration_seconds``, ``overhead_seconds``; each may be missing.
        attempts: task-run attempts by ``stage`` or ``stage[shard]``; what is not there took one.
    """
    whole = row.get("iteration_seconds", 0.0)
    stages = [name.removeprefix("seconds/") for name in row if name.startswith("seconds/")]
    stages.sort(key=lambda stage: (ORDER.index(stage) if stage in ORDER else len(ORDER), stage))
    table = [_line(stage, row, attempts, whole) for stage in stages]
    if "overhead_seconds" in row:
        table.append(_plain("outside engines", row["overhead_seconds"], whole))
    if whole:
        table.append(_plain("iteration", whole, whole))
    return table


def _line(stage: str, row: Mapping[str, float], attempts: Mapping[str, int], whole: float) -> dict[str, object]:
    seconds = row[f"seconds/{stage}"]
    tokens = row.get("tokens", 0.0)
    if stage in FORWARD:
        tokens += row.get("prompt_tokens", 0.0)
    elif stage != "generate":
        tokens = 0.0
    tries = max((n for name, n in attempts.items() if name.partition("[")[0] == stage), default=1)
    return _plain(stage, seconds, whole) | {
        "attempts": tries,
        "tokens/s": f"{tokens / seconds:,.0f}" if tokens and seconds else "",
        "bytes": readable_bytes(row["weight_bytes"]) if stage == "sync-weights" and "weight_bytes" in row else "",
        "lag": f"{row['policy_lag']:g}" if stage == "generate" and "policy_lag" in row else "",
    }


def _plain(stage: str, seconds: float, whole: float) -> dict[str, object]:
    share = f"{100 * seconds / whole:.0f} %" if whole else ""
    return {
        "stage": stage,
        "seconds": round(seconds, 3),
        "share": share,
        "attempts": "",
        "tokens/s": "",
        "bytes": "",
        "lag": "",
    }


def readable_bytes(count: float) -> str:
    """1,234,567 → 1.2 MB; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
