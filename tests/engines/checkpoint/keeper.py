"""Keeps a version in several files, all of one value, and is killed before one of its changes of the disk.

options: store, version, value, kill_at; kill_at_tensor: before it gives that one.
"""

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from headrace.engines.checkpoint import kept, publish
from tests import kill

pipe: Connection = globals()["pipe"]
options: dict[str, Any] = globals()["options"]

kept.FILE_BYTES = 4096
names = [f"t{i}" for i in range(8)]
kill.before_change(options["kill_at"])


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        if name == options.get("kill_at_tensor"):
            os.kill(os.getpid(), signal.SIGKILL)
        yield name, torch.full((512,), float(options["value"]))


publish(
    tensors(),
    [(name, "float32", [512]) for name in names],
    version=options["version"],
    train_step=options["version"],
    transport="store",
    address=f"weights/v{options['version']:06d}",
    store=options["store"],
    partition_bytes=1024,
    beside={"config.json": b"{}", "tokenizer.json": b"[]"},
)
pipe.send("done")
