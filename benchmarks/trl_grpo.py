"""TRL's GRPOTrainer on the quickstart's job; run by ``benchmarks.campaign_vs_trl`` in an environment that has trl.

Reads ``{"model", "prompts": [[messages, answer], …], "steps", "prompts_per_step", "n", "max_tokens", "temperature",
"lr", "threads", "out"}`` from the file named on the command line, trains, writes seconds and reward of every step to
``out/steps.json`` and the trained model to ``out/model``.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

job = json.loads(Path(sys.argv[1]).read_text())
os.environ["OMP_NUM_THREADS"] = str(job["threads"])

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

torch.set_num_threads(job["threads"])
rewards: list[float] = []
seconds: list[float] = []


def last_number(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    values = [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]
    rewards.append(sum(values) / len(values))
    return values


class Clock(TrainerCallback):
    def on_train_begin(self, *_: object, **__: object) -> None:
        self.at = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        seconds.append(now - self.at)
        self.at = now
        print(f"trl step {len(seconds)}: {seconds[-1]:.1f} s, reward {rewards[-1]:.3f}", flush=True)


out = Path(job["out"])
config = GRPOConfig(
    output_dir=str(out),
    use_cpu=True,
    seed=0,
    bf16=True,  # float32 parameters, bfloat16 compute: as the other side
    model_init_kwargs={"dtype": "float32"},
    per_device_train_batch_size=job["prompts_per_step"] * job["n"],
    gradient_accumulation_steps=1,
    num_generations=job["n"],
    max_completion_length=job["max_tokens"],
    temperature=job["temperature"],
    learning_rate=job["lr"],
    lr_scheduler_type="constant",
    adam_beta2=0.95,
    beta=0.0,
    loss_type="dapo",
    scale_rewards="group",
    gradient_checkpointing=False,
    max_steps=job["steps"],
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    shuffle_dataset=False,
)
rows = [{"prompt": messages, "answer": answer} for messages, answer in job["prompts"]]
trainer = GRPOTrainer(
    model=job["model"],
    reward_funcs=last_number,
    args=config,
    train_dataset=Dataset.from_list(rows),
    callbacks=[Clock()],
)
trainer.train()
trainer.save_model(str(out / "model"))
(out / "steps.json").write_text(json.dumps({"seconds": seconds, "rewards": rewards}))
