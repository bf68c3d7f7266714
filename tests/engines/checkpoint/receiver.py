"""A receiver in a process of its own: pulls, writes what it got, says what it serves, or why not.

options: source, out, rank; deadline_s, device; hold = name of the tensor at which it says so and waits; places = name →
tensor like that of this receiver's own memory, where bytes go without the sink. Then it pulls from any source that it
is told, into the same file.
"""

from multiprocessing.connection import Connection
from typing import Any

import torch

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import WeightError, pull

pipe: Connection = globals()["pipe"]
options: dict[str, Any] = globals()["options"]
got: dict[str, torch.Tensor] = {}
places = {name: torch.empty_like(tensor) for name, tensor in options.get("places", {}).items()}


def sink(name: str, tensor: torch.Tensor) -> None:
    if name == options.get("hold"):
        pipe.send("holding")
        pipe.recv()
    got[name] = tensor.clone()


def take(source: WeightSource) -> None:
    got.clear()
    limits = {"deadline_s": options.get("deadline_s", 20), "device": options.get("device", "cpu")}
    try:
        served = pull(source, sink, rank=options["rank"], place=places.get if places else None, **limits)
    except WeightError as error:
        pipe.send(error)
    else:
        assert not got.keys() & {name for name, tensor in places.items() if tensor.numel()}
        torch.save({**places, **got}, options["out"])
        pipe.send(served)


take(options["source"])
while (source := pipe.recv()) is not None:
    options.pop("hold", None)
    take(source)
