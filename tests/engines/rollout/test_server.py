"""A rollout engine as its host starts it: a real process, jobs over HTTP, Arrow in a store."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
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
from headrace.engines.checkpoint import publish
from headrace.engines.experience.schema import GENERATE, PROMPTS
from headrace.engines.experience.store import Store
from headrace.engines.guard import descendants
from headrace.engines.process import Child
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.errors import NoChatTemplate
from headrace.engines.rollout.render import Renderer
from headrace.engines.rpc.client import EngineClient
from headrace.engines.rpc.errors import EngineLost, JobCancelled, JobDeadline, JobFailed

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], EngineClient]]:
    folder = tmp_path_factory.mktemp("host")
    child = start(tiny_model, folder)
    yield lambda: client(child, folder)
    assert child.stop() is not None


def start(model: Path, folder: Path, **rollout: Any) -> Child:
    spec = {
        "endpoint": str(folder / "endpoint.json"),
        "log_dir": str(folder),
        "epoch": 1,
        "token": "secret",
        "rollout": {
            "model": str(model),
            "dtype": "float32",
            "backend": {"kind": "transformers", "max_batch": 6},
        }
        | rollout,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "headrace.engines.rollout.server", "--spec", str(folder / "spec.json")]
    return Child(command, log=folder / "engine.log", env={"HF_HUB_OFFLINE": "1"})


def client(child: Child, folder: Path, patience_s: float = 90) -> EngineClient:
    end = time.monotonic() + patience_s
    while not (folder / "endpoint.json").exists():
        assert child.wait(0.1) is None and time.monotonic() < end, child.tail()
    url = json.loads((folder / "endpoint.json").read_text())["url"]
    lease = Lease(role="rollout", epoch=1, url=url, pid=child.pid, node="here", flow_run_id="f")
    return EngineClient(lease, token="secret", attempt=1)


def prompts(store: Store, n: int = 4) -> Manifest:
    rows = [
        {
            "group_id": 10 + i,
            "prompt_id": f"p{i}",
            "messages": json.dumps([{"role": "user", "content": f"{i} + {i}?"}]),
            "ground_truth": json.dumps(2 * i),
        }
        for i in range(n)
    ]
    part = store.write_table("prompts.arrow", pa.Table.from_pylist(rows, schema=PROMPTS))
    return store.commit(Manifest(stage="prompts", step=0, key="prompts", part=part))


def params(store: Store, key: str, **changes) -> dict:
    return {
        "store": store.url,
        "key": key,
        "step": 3,
        "shard": 1,
        "prompts": prompts(store).model_dump(),
        "start": 1,
        "stop": 4,
        "n": 3,
        "temperature": 0.8,
        "max_tokens": 12,
        "campaign_seed": 5,
        "version": 2,
        "inputs": ["prompts"],
    } | changes


async def load(c: EngineClient, model: Path, store: Store, version: int = 2) -> dict:
    tensors = load_file(model / "model.safetensors")
    publish(
        iter(tensors.items()),
        [(name, "float32", list(t.shape)) for name, t in tensors.items()],
        version=version,
        train_step=0,
        transport="store",
        address=f"weights/{version}",
        store=store.url,
        wire_dtype="float32",
    )
    source = WeightSource(version=version, transport="store", address=f"weights/{version}", store=store.url)
    job = {"source": source.model_dump(), "deadline_s": 10}
    return await c.call("load_weights", job, job_id=f"load-{Path(store.url).name}", deadline_s=20)


async def test_generate_writes_what_the_schema_says(started, tiny_model: Path, tmp_path: Path):
    store = Store(str(tmp_path))
    async with started() as c:
        served = await load(c, tiny_model, store)
        seen: list[dict[str, float]] = []
        made = await c.call("generate", params(store, "k1"), job_id="g1", deadline_s=60, on_progress=seen.append)
        health = await c.health()
    assert (health["version"], health["digest"]) == (2, served["digest"])
    assert seen and seen[-1]["groups"] == seen[-1]["of"] == 3
    manifest = Manifest.model_validate(made)
    assert manifest == store.lookup("generate", 3, 1, "k1")
    assert manifest.part is not None and manifest.part.rows == 9
    assert manifest.info["version"] == 2 and manifest.info["digest"] == served["digest"]
    table = store.read_table(manifest.part, verify=True)
    assert table.schema.equals(GENERATE)
    assert json.loads(table.schema.metadata[b"sampling"])["temperature"] == 0.8
    assert json.loads(table.schema.metadata[b"engine"])["dtype"] == "float32"
    rows = table.to_pylist()
    assert [r["uid"] for r in rows] == [f"{g}-{s}" for g in (11, 12, 13) for s in range(3)]
    assert manifest.metrics["tokens"] == sum(len(r["response_ids"]) for r in rows)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for row in rows:
        n = len(row["response_ids"])
        assert row["seed"] == sample_seed(5, row["group_id"], row["sample"])
        assert row["weight_spans"] == [{"version": 2, "tokens": n}]
        assert row["response_mask"] == [1] * n and len(row["behaviour_logprobs"]) == n
        assert (row["response_ids"][-1] == 2) == (row["finish_reason"] == "stop")
        i = row["group_id"] - 10
        assert row["prompt_text"] == f"<|im_start|>user\n{i} + {i}?<|im_end|>\n<|im_start|>assistant\n"
        assert row["ground_truth"] == str(2 * i) and row["prompt_id"] == f"p{i}"
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / 0.8, -1)
        expected = logprobs.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["behaviour_logprobs"]), expected, atol=1e-4, rtol=0)


async def test_generate_is_idempotent_and_reproducible(started, tiny_model: Path, tmp_path: Path):
    store = Store(str(tmp_path))
    async with started() as c:
        await load(c, tiny_model, store)
        first = await c.call("generate", params(store, "k1"), job_id="h1", deadline_s=60)
        again = await c.call("generate", params(store, "k1"), job_id="h2", deadline_s=60)
        other = await c.call("generate", params(store, "k2"), job_id="h3", deadline_s=60)
    assert first == again
    assert other["key"] == "k2"
    assert other["part"]["digest"] == first["part"]["digest"]  # the same bytes from a second run


async def test_other_weights_than_asked_for_are_refused(started, tiny_model: Path, tmp_path: Path):
    store = Store(str(tmp_path))
    async with started() as c:
        await load(c, tiny_model, store)
        with pytest.raises(JobFailed, match="needs weight version 9, but this engine serves version 2"):
            await c.call("generate", params(store, "k1", version=9), job_id="w1", deadline_s=60)
        with pytest.raises(JobFailed, match="no job 'train'"):
            await c.call("train", {}, job_id="w2", deadline_s=60)
    assert store.manifests(3) == []


async def test_evaluate_is_greedy(started, tiny_model: Path, tmp_path: Path):
    store = Store(str(tmp_path))
    async with started() as c:
        await load(c, tiny_model, store)
        wanted = {k: v for k, v in params(store, "e").items() if k not in ("n", "temperature")}
        one = await c.call("evaluate", wanted, job_id="e1", deadline_s=60)
        two = await c.call("evaluate", wanted | {"key": "f", "campaign_seed": 99}, job_id="e2", deadline_s=60)
    tables = [store.read_table(Manifest.model_validate(m).part) for m in (one, two)]  # pyright: ignore
    assert one["stage"] == "evaluate" and tables[0].num_rows == 3
    assert tables[0]["response_ids"].to_pylist() == tables[1]["response_ids"].to_pylist()


async def test_a_cancelled_job_stops_between_two_tokens(started, tiny_model: Path, tmp_path: Path):
    store = Store(str(tmp_path))
    async with started() as c:
        await load(c, tiny_model, store)
        long = params(store, "c", n=64, max_tokens=450, stop=2)
        with pytest.raises(JobDeadline):
            await c.call("generate", long, job_id="c1", deadline_s=0.3)
        with pytest.raises((JobCancelled, JobDeadline)):
            while True:
                view = await c._request("GET", "/jobs/c1", params={"wait": 5})
                if view["state"] == "cancelled":
                    raise JobCancelled
                assert view["state"] == "running"
        assert len((await c.call("generate", params(store, "d"), job_id="c2", deadline_s=60))["inputs"]) == 1
    assert [m.key for m in store.manifests(3)] == ["d"]


def test_a_tokenizer_without_chat_template_is_refused(tiny_model: Path, tmp_path: Path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(NoChatTemplate, match="no chat template"):
        Renderer(tmp_path / "model")
    child = start(tmp_path / "model", tmp_path)
    assert child.wait(60) == 1
    assert "cannot start" in child.tail() and "no chat template" in child.tail()
    assert "Traceback" not in child.tail()
    child.stop()


def test_an_interpreter_without_the_engine_is_refused(tiny_model: Path, tmp_path: Path):
    for kind, what in (
        ("vllm", "cannot import vllm"),
        ("sglang", "cannot import sglang"),
        ("trtllm", "has no tensorrt_llm"),
    ):
        child = start(tiny_model, tmp_path, python=sys.executable, gpus=1, backend={"kind": kind})
        assert child.wait(60) == 1
        assert f"the rollout engine cannot start: {sys.executable} {what}" in child.tail(3), child.tail()
        child.stop()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif("HEADRACE_VLLM_PYTHON" not in os.environ, reason="HEADRACE_VLLM_PYTHON is not set")
async def test_vllm_serves_the_same_jobs_and_its_death_is_noticed(make_model: Callable[..., Path], tmp_path: Path):
    model, store = make_model(head_dim=32), Store(str(tmp_path / "store"))
    child = start(model, tmp_path, **vllm())
    try:
        async with client(child, tmp_path, patience_s=240) as c:
            served = await load(c, model, store)
            made = Manifest.model_validate(await c.call("generate", params(store, "v"), job_id="v", deadline_s=60))
            assert (await c.health())["digest"] == served["digest"] == made.info["digest"]
        assert made.part is not None and made.part.rows == 9
        assert "processed_logprobs" in made.info["fingerprint"]["flags"]
        started = descendants(child.pid)
        assert len(started) >= 4  # our server, vLLM's guard, its API process, its engine
        # It dies when the first of three groups is done: then there is something to go on from, and much to do.
        running, begun = params(store, "w", n=64, max_tokens=450), asyncio.Event()
        call = client(child, tmp_path).call
        asking = asyncio.create_task(
            call("generate", running, job_id="w", deadline_s=60, on_progress=lambda _: begun.set())
        )
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        guard, api = (pid for pid in started if b"rollout.vllm_child" in Path(f"/proc/{pid}/cmdline").read_bytes())
        assert api in descendants(guard)
        os.kill(api, signal.SIGKILL)
        with pytest.raises(EngineLost):
            await asking
        assert child.wait(30) == 1
        assert "the rollout engine is lost: vLLM" in child.tail(200)
        await gone(started)
    finally:
        child.stop()
    # The shard goes on elsewhere, from the tokens that it had.
    (tmp_path / "endpoint.json").unlink()
    child = start(model, tmp_path, **vllm())
    try:
        async with client(child, tmp_path, patience_s=240) as c:
            await load(c, model, store)
            made = Manifest.model_validate(await c.call("generate", running, job_id="w", deadline_s=120))
    finally:
        child.stop()
    assert made.part is not None and made.part.rows == 192 and made.metrics["resumed_tokens"] > 0
    rows = store.read_table(made.part).to_pylist()
    assert len({row["uid"] for row in rows}) == 192
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in rows[::16]:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.inference_mode():
            logprobs = torch.log_softmax(reference(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / 0.8, -1)
        expected = logprobs.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["behaviour_logprobs"]), expected, atol=1e-4, rtol=0)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif("HEADRACE_VLLM_PYTHON" not in os.environ, reason="HEADRACE_VLLM_PYTHON is not set")
async def test_vllm_dies_with_its_host(make_model: Callable[..., Path], tmp_path: Path):
    child = start(make_model(head_dim=32), tmp_path, **vllm())
    try:
        await client(child, tmp_path, patience_s=240).__aexit__()
        started = descendants(child.pid)
        os.kill(json.loads((tmp_path / "endpoint.json").read_text())["pid"], signal.SIGKILL)
        await gone(started)
    finally:
        child.stop()


def vllm() -> dict[str, Any]:
    backend = {"kind": "vllm", "max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 100_000_000}
    return {"python": os.environ["HEADRACE_VLLM_PYTHON"], "backend": backend}


async def gone(pids: list[int]) -> None:
    """Returns when none of the processes is left."""
    async with asyncio.timeout(30):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)
