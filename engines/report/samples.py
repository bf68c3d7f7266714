"""A few answers with their rewards, as Markdown for the UI."""

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST = 1500
"""Characters of a text that are shown."""


def samples_markdown(generated: "pa.Table", scored: "pa.Table", count: int) -> str:
    """Some samples of one shard, spread from the worst reward to the best, with those that could not be scored first.

    Args:
        generated: rows in the GENERATE schema. scored: rows in the SCORE schema of the same samples, in any order.
        count: samples shown, at most.
    """
    columns = ["uid", "prompt_id", "prompt_text", "response_ids", "finish_reason", "text", "ground_truth"]
    scores = {row["uid"]: row for row in scored.to_pylist()}
    rewards = [scores[uid]["reward"] for uid in generated["uid"].to_pylist()]
    ranked = sorted(range(len(rewards)), key=lambda i: (rewards[i] is not None, rewards[i] or 0.0, i))
    last = len(ranked) - 1
    places = sorted({round(i * last / max(1, count - 1)) for i in range(count)}) if ranked else []
    table = generated.select(columns)
    shown = [table.slice(ranked[place], 1).to_pylist()[0] for place in places]
    return "\n".join(_sample(row, scores[row["uid"]]) for row in shown)


def _sample(row: dict, score: dict) -> str:
    reward = "not scored" if score["reward"] is None else f"reward {score['reward']:.3g}"
    facts = [f"{len(row['response_ids'])} tokens", f"finished by {row['finish_reason']}"]
    facts += [f"{inline(name)} {value:.3g}" for name, value in score["reward_parts"] if len(score["reward_parts"]) > 1]
    lines = [
        f"### {reward} · sample {row['uid']}",
        f"{inline(row['prompt_id'])}: {', '.join(facts)}; right answer {inline(_gold(row['ground_truth']))}",
    ]
    if score["score_error"] is not None:
        lines += ["", "Scoring failed:", fenced(score["score_error"])]
    return "\n".join([*lines, "", fenced(row["prompt_text"]), "", fenced(row["text"]), ""])


def _gold(document: str) -> str:
    truth = json.loads(document)
    if isinstance(truth, dict) and "answer" in truth:
        truth = truth["answer"]
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)


def _shortened(text: str, longest: int) -> str:
    cut = len(text) - longest
    return text if cut <= 0 else f"{text[:longest]} … ({cut} more characters)"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def fenced(text: str) -> str:
    """The text as a code block that nothing in it can end."""
    text = _shortened(text, LONGEST)
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def inline(text: str) -> str:
    """The text as code inside a line."""
    text = _shortened(" ".join(text.split()), 200)
    ticks = "`" * (_longest_run(text) + 1)
    return f"{ticks} {text} {ticks}" if "`" in text or not text else f"`{text}`"
