"""A publisher in a process of its own: says its manifest, or why not.

options: model, address, version; receivers, deadline_s; hold = name of the tensor at which it says so and waits.
"""

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from headrace.engines.checkpoint import WeightError, publish

pipe: Connection = globals()["pipe"]
options: dict[str, Any] = globals()["options"]
model: dict[str, torch.Tensor] = torch.load(options["model"])


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.items():
        if name == options.get("hold"):
            pipe.send("holding")
            pipe.recv()
        yield name, tensor


try:
    manifest = publish(
        tensors(),
        [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in model.items()],
        version=options["version"],
        train_step=options["version"],
        transport="shm",
        address=options["address"],
        receivers=options.get("receivers", 1),
        partition_bytes=4096,
        deadline_s=options.get("deadline_s", 20),
    )
except WeightError as error:
    pipe.send(error)
else:
    pipe.send(manifest)
