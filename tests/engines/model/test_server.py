"""The model engine's process, as a host and the stage tasks use it: real gangs, real sockets, a real store."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.blocks.lease import Lease
from headrace.blocks.manifest import Manifest
from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import pull
from headrace.engines.experience.schema import GENERATE, SCORE
from headrace.engines.experience.store import Store
from headrace.engines.guard import descendants
from headrace.engines.process import Child
from headrace.engines.rpc.client import EngineClient
from headrace.engines.rpc.errors import EngineLost, JobFailed
from tests.engines.model.conftest import REPOSITORY
from tests.engines.model.experience import random_samples

TOKEN = "secret"


@dataclass
class Engine:
    """A running server and the store it works on."""

    child: Child
    lease: Lease
    store: Store
    count: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One job; each call is a new one for the server."""
        self.count += 1

        async def run() -> dict[str, Any]:
            async with EngineClient(self.lease, token=TOKEN, attempt=1) as client:
                return await client.call(method, params, job_id=f"{method}-{self.count}", deadline_s=90)

        return asyncio.run(run())

    def stage(self, method: str, key: str, **params: Any) -> Manifest:
        given = {"store": self.store.url, "step": 0, "key": key, "inputs": ["x"], **params}
        return Manifest.model_validate(self.call(method, **given))

    def health(self) -> dict[str, Any]:
        async def run() -> dict[str, Any]:
            async with EngineClient(self.lease, token=TOKEN, attempt=1) as client:
                return await client.health()

        return asyncio.run(run())

    def shutdown(self) -> int | None:
        async def run() -> None:
            async with EngineClient(self.lease, token=TOKEN, attempt=1) as client:
                await client.shutdown()

        asyncio.run(run())
        return self.child.wait(30)


StartEngine = Callable[..., Engine]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """``start(ranks) -> Engine``: a server on the tiny model in float32, with a reference copy."""
    children: list[Child] = []

    def run(ranks: int) -> Engine:
        folder = tmp_path / f"engine-{len(children)}"
        folder.mkdir()
        endpoint = folder / "endpoint.json"
        engine = {"model": str(tiny_model), "dtype": "float32", "reference": True, "tokens_per_microbatch": 48}
        spec = {"endpoint": str(endpoint), "epoch": 1, "token": TOKEN, "engine": engine}
        (folder / "spec.json").write_text(json.dumps(spec))
        gang = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        program = [*(gang if ranks > 1 else []), "-m", "headrace.engines.model.server"]
        children.append(
            Child(
                [sys.executable, *program, "--spec", str(folder / "spec.json")],
                log=folder / "engine.log",
                env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        )
        for _ in range(400):
            if endpoint.exists() or children[-1].wait(0.3) is not None:
                break
        assert endpoint.exists(), children[-1].tail()
        reached = json.loads(endpoint.read_text())
        lease = Lease(role="actor", index=0, epoch=1, url=reached["url"], pid=reached["pid"], node="", flow_run_id="")
        return Engine(children[-1], lease, Store(str(tmp_path / "store")))

    yield run
    for child in children:
        child.stop()


def generated(store: Store, shard: int) -> tuple[Manifest, Manifest]:
    """Random samples of one shard with rewards, one of them not scored."""
    samples = random_samples(groups=2, seed=shard)
    prompts, offsets = samples.prompt_offsets.tolist(), samples.offsets.tolist()
    draw = torch.Generator().manual_seed(shard)
    rows, scores = [], []
    for i, group in enumerate(samples.groups.tolist()):
        uid = f"{group + 100 * shard}-{i}"
        size = offsets[i + 1] - offsets[i]
        rows.append(
            {
                "uid": uid,
                "group_id": group + 100 * shard,
                "prompt_id": "p",
                "sample": i,
                "prompt_ids": samples.prompt_ids[prompts[i] : prompts[i + 1]].tolist(),
                "response_ids": samples.response_ids[offsets[i] : offsets[i + 1]].tolist(),
                "response_mask": [1] * size,
                "behaviour_logprobs": (-2 * torch.rand(size, generator=draw)).tolist(),
                "weight_spans": [{"version": 0, "tokens": size}],
                "finish_reason": "stop",
                "turns": 1,
                "seed": i,
                "prompt_text": "",
                "text": "",
                "ground_truth": "1",
            }
        )
        reward = None if i == 1 else float(torch.rand(1, generator=draw))
        parts = [] if reward is None else [("exact", reward)]
        scores.append({"uid": uid, "reward": reward, "reward_parts": parts, "score_error": None})
    made = []
    for stage, table in (("generate", rows), ("score", list(reversed(scores)))):
        schema = GENERATE if stage == "generate" else SCORE
        part = store.write_table(f"experience/000000/{stage}-{shard}.arrow", pa.Table.from_pylist(table, schema=schema))
        made.append(store.commit(Manifest(stage=stage, step=0, shard=shard, key=f"{stage}{shard}", part=part)))
    return made[0], made[1]


ALGORITHM = {"kl": {"kind": "loss", "coefficient": 0.01}}


def iteration(engine: Engine, key: str = "a") -> tuple[dict[str, Any], Manifest]:
    """All jobs of an iteration; returns the parameters of the train job and what it gave."""
    shards = [generated(engine.store, shard) for shard in range(2)]
    samples, scores = [g for g, _ in shards], [s for _, s in shards]
    old, ref = (
        [
            engine.stage("logprobs", f"{which}{m.shard}", shard=m.shard, which=which, generate=m.model_dump())
            for m in samples
        ]
        for which in ("old", "ref")
    )
    dump: Callable[[list[Manifest]], list[dict[str, Any]]] = lambda ms: [m.model_dump() for m in ms]  # noqa: E731
    common = {"generate": dump(samples), "old": dump(old), "ref": dump(ref), "algorithm": ALGORITHM}
    advantage = engine.stage("advantage", "adv", score=dump(scores), max_tokens=7, **common)
    assert advantage.metrics["dropped/scoring_failed"] == 2
    table = engine.store.read_table(advantage.part)  # type: ignore[arg-type]
    assert table["accepted"].to_pylist().count(False) == 2
    optim = {"lr": 1e-3}
    train = {**common, "advantage": advantage.model_dump(), "optim": optim, "minibatches": 2, "total_steps": 4}
    return train, engine.stage("train", key, **train)


def publish(engine: Engine, version: int, step: int | None = None, quantization: str | None = None) -> str:
    address = f"weights/v{version:06d}"
    sent = engine.call(
        "publish",
        version=version,
        step=step,
        transport="store",
        address=address,
        store=engine.store.url,
        receivers=0,
        quantization=quantization,
        deadline_s=30,
    )
    source = WeightSource(version=version, transport="store", address=address, store=engine.store.url)
    names: list[str] = []
    served = pull(source, lambda name, tensor: names.append(name), deadline_s=30)
    assert served.digest == sent["digest"] and "model.embed_tokens.weight" in names
    assert ("model.layers.1.mlp.down_proj.weight_scale_inv" in names) == bool(quantization)
    return served.digest


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_iteration_over_the_wire(start: StartEngine, tmp_path: Path, ranks: int) -> None:
    engine = start(ranks)
    assert engine.health()["train_step"] == 0 and engine.health()["ranks"] == ranks
    before = publish(engine, 0)
    train, first = iteration(engine)
    assert first.metrics["updates/done"] == 2 and first.metrics["tokens"] > 0
    assert engine.health()["train_step"] == 1
    assert engine.stage("train", "a", **train) == first, "asked twice, stepped once"
    after = publish(engine, 1)
    assert after != before
    with pytest.raises(JobFailed, match=r"StepRefused: .*at step 1.*asked for step 0 with key other"):
        engine.stage("train", "other", **train)
    engine.call("save", path=str(tmp_path / "state"), step=1, cursor=3)
    with pytest.raises(JobFailed, match="no job 'dance'"):
        engine.call("dance")
    assert engine.call("load", path=None) == {"train_step": 0, "cursor": 0}
    assert publish(engine, 2) == before
    replayed = engine.stage("train", "a", **train)
    assert replayed == first, "the manifest that was committed first counts"
    assert publish(engine, 3) == after, "the same step on the same bytes gives the same bits"
    assert engine.call("load", path=str(tmp_path / "state")) == {"train_step": 1, "cursor": 3}
    assert publish(engine, 4) == after
    with pytest.raises(JobFailed, match=r"StepRefused: .*at step 1, not 2: version 5 was not published"):
        publish(engine, 5, step=2)
    assert publish(engine, 5, step=1) == after
    found = AutoModelForCausalLM.from_pretrained(engine.store.locate("weights/v000005")).state_dict()
    kept = load_file(engine.store.locate("weights/v000005/model.safetensors"))
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    assert publish(engine, 6, quantization="fp8") != after
    assert engine.shutdown() == 0, engine.child.tail()


def test_a_lost_rank_ends_the_gang(start: StartEngine) -> None:
    engine = start(2)
    below = descendants(engine.child.pid)
    (other,) = (pid for pid in below if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(other, signal.SIGKILL)
    assert engine.child.wait(30) not in (None, 0)
    with pytest.raises(EngineLost):
        engine.health()


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    spec = {"endpoint": str(tmp_path / "e"), "epoch": 1, "token": TOKEN, "engine": {"model": str(tmp_path), "gpus": 1}}
    for change, message in (({}, "gpus"), ({"engine": {"model": str(tmp_path)}}, "it has no config.json")):
        (tmp_path / "spec.json").write_text(json.dumps(spec | change))
        command = [sys.executable, "-m", "headrace.engines.model.server", "--spec", str(tmp_path / "spec.json")]
        child = Child(command, log=tmp_path / "log", env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
        assert child.wait(60) == 1
        assert "the model engine cannot start" in child.tail() and message in child.tail()
