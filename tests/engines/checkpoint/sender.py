"""A publisher in a process of its own: says its address (where it chose it), then its manifest, or why not.

options: model, transport, version; address (none: it reserves a port of ``host``); receivers, deadline_s, delta;
device; hold = name of the tensor at which it says so and waits. Then it publishes any file that it is told as the next.
"""

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from headrace.engines.checkpoint import WeightError, publish, reserve

pipe: Connection = globals()["pipe"]
options: dict[str, Any] = globals()["options"]


def tensors(model: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.items():
        if name == options.get("hold"):
            pipe.send("holding")
            pipe.recv()
        yield name, tensor


def send(path: str, version: int) -> None:
    model: dict[str, torch.Tensor] = torch.load(path)
    try:
        manifest = publish(
            tensors(model),
            [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in model.items()],
            version=version,
            train_step=version,
            transport=options.get("transport", "shm"),
            address=address,
            receivers=options.get("receivers", 1),
            partition_bytes=4096,
            delta=options.get("delta", False),
            device=options.get("device", "cpu"),
            deadline_s=options.get("deadline_s", 20),
        )
    except WeightError as error:
        pipe.send(error)
    else:
        pipe.send(manifest)


address = options.get("address") or reserve(options.get("host", "127.0.0.1"))
if "address" not in options:
    pipe.send(address)
send(options["model"], options["version"])
while (again := pipe.recv()) is not None:
    send(again, options["version"] + 1)
