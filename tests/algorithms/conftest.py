"""The golden batch of verl, as flat tensors."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass
class Golden:
    inputs: dict
    cases: dict
    batch: Jagged
    tool_batch: Jagged
    """The same samples with tool tokens inside two of them."""
    groups: Tensor

    def flat(self, name: str) -> Tensor:
        return torch.tensor(self.inputs[name], dtype=torch.float64).reshape(-1)

    @property
    def rewards(self) -> Tensor:
        return torch.tensor(self.inputs["rew"], dtype=torch.float64).sum(1)


@pytest.fixture(scope="session")
def golden() -> Golden:
    data = json.loads((GOLDEN / "verl.json").read_text())
    inputs = data["inputs"]
    batch, tools = (Jagged.from_padded(torch.tensor(inputs[name])) for name in ("mask", "mask2"))
    return Golden(inputs, data["cases"], batch, tools, torch.tensor([ord(u) for u in inputs["uid"]]))


@pytest.fixture(scope="session")
def trl_dpo() -> dict:
    return json.loads((GOLDEN / "trl_dpo.json").read_text())
