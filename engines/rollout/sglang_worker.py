"""Runs inside SGLang's scheduler processes, in SGLang's environment: pulls a weight version into the running model.

``custom_weight_loader`` names ``load``, SGLang's plug-in point for weights of a format of one's own. What comes in is
one small tensor that says where to pull from; what comes out is a file with the outcome, as the call returns nothing.
"""

import json
from pathlib import Path
from typing import Any

import torch

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import WeightError, pull

LOADER = "headrace.engines.rollout.sglang_worker.load"
PARAMETERS = "headrace.order"


def order(source: str, expect: str, deadline_s: str, outcome: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensor that ``load`` gets: a JSON text as bytes."""
    text = json.dumps([source, expect, deadline_s, str(outcome)]).encode()
    return [(PARAMETERS, torch.tensor(list(text), dtype=torch.uint8))]


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Streams a version into ``model``; writes ``outcome.RANK``: ``served``, or ``error`` and ``spoiled``."""
    [(_, tensor)] = named_tensors
    source, expect, deadline_s, outcome = json.loads(bytes(tensor.cpu().tolist()))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    begun = False

    def take(name: str, weights: torch.Tensor) -> None:
        nonlocal begun
        begun = True
        model.load_weights([(name, weights)])

    try:
        wanted = {name: (dtype, shape) for name, (dtype, shape) in json.loads(expect).items()}
        served = pull(
            WeightSource.model_validate_json(source),
            take,
            deadline_s=float(deadline_s),
            expect=wanted,
            rank=rank,
            device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu",
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        said: dict[str, Any] = {"served": served.model_dump()}
    except WeightError as error:
        said = {"error": str(error), "spoiled": begun}
    Path(f"{outcome}.{rank}").write_text(json.dumps(said))
