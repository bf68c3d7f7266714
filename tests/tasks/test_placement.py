"""Placement chooses the transport; a forced one that cannot work is refused before anything is sent."""

import pytest

from headrace.blocks.lease import Lease
from headrace.blocks.recipe import Recipe
from headrace.tasks.placement import WrongPlacement, transport_for, workers


def recipe(
    transport: str = "auto", gpus: int = 0, rollout_pool: str = "rollout", backend: str = "transformers"
) -> Recipe:
    roles = {"actor": {"pool": "actor", "gpus": gpus}, "rollout": {"pool": rollout_pool, "gpus": gpus}}
    given = {"base": "quickstart", "roles": roles, "weights": {"transport": transport}}
    return Recipe.model_validate(given | {"rollout": {"backend": {"kind": backend}}})


def lease(role: str, node: str) -> Lease:
    return Lease(role=role, epoch=1, url="http://127.0.0.1:1", pid=1, node=node, flow_run_id="x")


@pytest.mark.parametrize(
    ("transport", "gpus", "pool", "backend", "nodes", "expected"),
    [
        ("auto", 0, "rollout", "transformers", ["a", "a"], "shm"),
        ("auto", 0, "rollout", "transformers", ["a", "b"], "tcp"),
        ("auto", 1, "actor", "vllm", ["a"], "cuda-ipc"),
        ("auto", 1, "actor", "sglang", ["a"], "shm"),
        ("auto", 1, "rollout", "vllm", ["a"], "shm"),
        ("auto", 1, "rollout", "vllm", ["b"], "tcp"),
        ("store", 1, "rollout", "vllm", ["a"], "store"),
        ("gloo", 0, "rollout", "transformers", ["b"], "gloo"),
    ],
)
def test_the_choice(transport: str, gpus: int, pool: str, backend: str, nodes: list[str], expected: str) -> None:
    leases = [lease("rollout", node) for node in nodes]
    assert transport_for(recipe(transport, gpus, pool, backend), lease("actor", "a"), leases) == expected


def test_shared_memory_across_machines_is_refused() -> None:
    with pytest.raises(WrongPlacement, match="the actor is on a and rollout engines are on b, c: choose auto"):
        transport_for(recipe("shm"), lease("actor", "a"), [lease("rollout", node) for node in ("a", "c", "b")])


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({"transport": "cuda-ipc"}, "needs GPUs for actor and rollout"),
        ({"transport": "nccl"}, "needs GPUs for actor and rollout"),
        ({"transport": "store", "delta": True}, "delta has no effect under transport: store"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(weights: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Recipe.model_validate({"base": "quickstart", "weights": weights})


def test_every_worker_of_vllm_pulls() -> None:
    given = {"base": "quickstart", "roles": {"rollout": {"pool": "rollout", "gpus": 4}}}
    assert workers(Recipe.model_validate(given | {"rollout": {"backend": {"kind": "vllm"}}})) == 4
    assert workers(recipe()) == 1


def test_the_host_pulls_an_adapter_once_through_host_memory() -> None:
    given = {"base": "quickstart", "model": {"lora": {"rank": 4}}, "rollout": {"backend": {"kind": "vllm"}}}
    pool = {"pool": "gpu", "gpus": 4}
    of_gpus = Recipe.model_validate(given | {"roles": {"actor": pool, "rollout": pool}})
    assert workers(of_gpus) == 1
    assert transport_for(of_gpus, lease("actor", "a"), [lease("rollout", "a")]) == "shm"
    assert transport_for(of_gpus, lease("actor", "a"), [lease("rollout", "b")]) == "tcp"
