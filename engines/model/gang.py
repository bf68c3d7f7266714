"""The ranks of one engine: who they are, how they reach each other."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class Gang:
    """This process among the ranks of its engine."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    store: Store
    """Of all ranks, for jobs and their outcomes."""
    saving: dist.ProcessGroup | None = None
    """All ranks on the CPU, for writing state while the other groups train; None = the default group."""

    def agree(self, value: bool) -> bool:
        """Rank 0's value, on every rank."""
        decision = torch.tensor(value)
        if self.size > 1:
            dist.broadcast(decision, 0)
        return bool(decision)


def join(device: str, threads: int, timeout_s: float) -> Gang:
    """Joins the gang that torchrun started, or makes a gang of one: gloo on CPUs, NCCL on GPUs.

    timeout_s: the longest that a collective waits for another rank.
    """
    torch.set_num_threads(threads)
    if "RANK" in os.environ:
        store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    else:
        store, rank, size = HashStore(), 0, 1
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    mesh, saving = init_device_mesh(device, (size,)), dist.new_group(backend="gloo")
    return Gang(rank, size, place, mesh, PrefixStore("jobs", store), saving)
