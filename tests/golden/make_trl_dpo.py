"""Computes tests/golden/trl_dpo.json with TRL 0.19.1's DPO loss, in float64 on the CPU.

In an environment of its own: ``pip install torch trl==0.19.1 transformers==4.53.3``; then ``python make_trl_dpo.py
trl_dpo.json``. 0.19.1 is the last minor version whose loss takes sequence log-probabilities and has label smoothing and
a reference-free form; its IPO expects means over tokens, as here.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import trl  # pyright: ignore[reportMissingImports]
from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
LENGTHS = [5, 3, 7, 4, 1, 6, 2, 8]
CHOSEN, REJECTED = [0, 2, 4, 7], [1, 3, 5, 6]
new = [-2 * torch.rand(n) for n in LENGTHS]
reference = [(x + 0.3 * torch.randn(len(x))).clamp(max=-1e-3) for x in new]
cases = []
for options in (
    {"form": "sigmoid"},
    {"form": "sigmoid", "label_smoothing": 0.1},
    {"form": "sigmoid", "reference_free": True},
    {"form": "sigmoid", "beta": 0.7, "label_smoothing": 0.3, "reference_free": True},
    {"form": "ipo"},
    {"form": "ipo", "beta": 0.7},
    {"form": "ipo", "reference_free": True},
):
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        reference_free=options.get("reference_free", False),
        f_divergence_type="reverse_kl",
        f_divergence_params=None,
        loss_type=options["form"],
        beta=options.get("beta", 0.1),
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    tokens = [x.clone().requires_grad_() for x in new]
    reduce = torch.mean if options["form"] == "ipo" else torch.sum
    policy, frozen = (torch.stack([reduce(x) for x in xs]) for xs in (tokens, reference))
    losses, chosen, rejected = DPOTrainer.dpo_loss(
        trainer, policy[CHOSEN], policy[REJECTED], frozen[CHOSEN], frozen[REJECTED]
    )
    losses.mean().backward()
    cases.append(
        {
            "options": options,
            "losses": losses.tolist(),
            "grad": torch.cat([x.grad for x in tokens if x.grad is not None]).tolist(),
            "chosen_rewards": chosen.tolist(),
            "rejected_rewards": rejected.tolist(),
        }
    )
inputs = {
    "lengths": LENGTHS,
    "pairs": list(zip(CHOSEN, REJECTED, strict=True)),
    "new": torch.cat(new).tolist(),
    "reference": torch.cat(reference).tolist(),
}
versions = {"trl": trl.__version__, "torch": torch.__version__}
Path(sys.argv[1]).write_text(json.dumps({"versions": versions, "inputs": inputs, "cases": cases}))
print(len(cases), "cases", versions)
