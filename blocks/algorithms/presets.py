"""Named algorithms, as published. What each sets is data; a recipe overrides single settings."""

from typing import Any, Literal

Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "rloo",
    "reinforce_pp",
    "remax",
    "ppo",
    "dpo",
    "online_dpo",
]

TOKEN_MEAN = {"kind": "token-mean"}
SEQ_MEAN = {"kind": "seq-mean-token-mean"}
GRPO = {"kind": "grpo"}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": GRPO, "loss": {"kind": "ppo_clip"}, "aggregation": SEQ_MEAN},
    "dr_grpo": {
        "advantage": {"kind": "grpo", "std": False},
        "loss": {"kind": "ppo_clip"},
        "aggregation": {"kind": "seq-mean-token-sum-norm"},
    },
    "dapo": {
        "advantage": GRPO,
        "loss": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": TOKEN_MEAN,
        "filter": {"kind": "equal_rewards"},
    },
    "gspo": {"advantage": GRPO, "loss": {"kind": "gspo"}, "aggregation": SEQ_MEAN},
    "cispo": {"advantage": GRPO, "loss": {"kind": "cispo"}, "aggregation": TOKEN_MEAN},
    "sapo": {"advantage": GRPO, "loss": {"kind": "sapo"}, "aggregation": SEQ_MEAN},
    "gmpo": {"advantage": GRPO, "loss": {"kind": "gmpo"}, "aggregation": None},
    "rloo": {
        "advantage": {"kind": "rloo"},
        "loss": {"kind": "reinforce"},
        "aggregation": {"kind": "seq-mean-token-sum"},
        "kl": {"kind": "reward", "estimator": "k1", "coefficient": 0.05},
    },
    "reinforce_pp": {
        "advantage": {"kind": "reinforce_pp"},
        "loss": {"kind": "ppo_clip"},
        "aggregation": TOKEN_MEAN,
        "kl": {"kind": "reward", "estimator": "k1", "coefficient": 0.01},
    },
    "remax": {
        "advantage": {"kind": "remax"},
        "loss": {"kind": "reinforce"},
        "aggregation": {"kind": "seq-mean-token-sum"},
        "kl": {"kind": "reward", "estimator": "k1", "coefficient": 0.01},
    },
    "ppo": {
        "advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.95},
        "loss": {"kind": "ppo_clip"},
        "aggregation": TOKEN_MEAN,
        "kl": {"kind": "reward", "estimator": "k1", "coefficient": 0.05},
        "value": {"clip": 0.2},
    },
    "dpo": {"advantage": None, "loss": {"kind": "dpo", "pairs": "given"}, "aggregation": None},
    "online_dpo": {"advantage": None, "loss": {"kind": "dpo", "pairs": "best_worst"}, "aggregation": None},
}


def with_preset(data: dict[str, Any]) -> dict[str, Any]:
    """The settings of ``data`` over those of its preset: same kind → setting by setting; another kind → replaced."""
    preset = PRESETS.get(data.get("preset", "grpo"), {})
    merged = {**preset, **data}
    for name, base in preset.items():
        given = data.get(name)
        if (
            isinstance(base, dict)
            and isinstance(given, dict)
            and given.get("kind", base.get("kind")) == base.get("kind")
        ):
            merged[name] = {**base, **given}
    return merged
