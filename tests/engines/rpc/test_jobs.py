"""Jobs are idempotent by id, cancellable, fenced by epoch and attempt, and report what went wrong."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from headrace.blocks.lease import Lease
from headrace.engines.rpc.client import EngineClient
from headrace.engines.rpc.errors import EngineLost, Fenced, JobDeadline, JobFailed
from headrace.engines.rpc.server import Job, JobServer


@pytest.fixture
def engine(tmp_path):
    ran: list[str] = []
    told = [threading.Event() for _ in range(3)]

    def execute(job: Job) -> dict:
        ran.append(job.id)
        if job.method == "fail":
            raise ValueError("the shard is empty")
        if job.method == "count":
            for n in range(3):
                job.progress(groups=n)
                assert told[n].wait(5), "the client has not heard of it"
        if job.method in ("wait", "exchange"):
            job.progress(groups=3)
            if job.cancelled.wait(20):
                raise RuntimeError("stopped")
        return {"echo": job.params}

    server = JobServer(
        execute, role="rollout", epoch=2, token="secret", status=lambda: {"version": 5}, exchanges=["exchange"]
    )
    thread = threading.Thread(target=server.run, args=(tmp_path / "endpoint",), daemon=True)
    thread.start()
    for _ in range(200):
        if (tmp_path / "endpoint").exists():
            break
        time.sleep(0.02)
    url = json.loads((tmp_path / "endpoint").read_text())["url"]

    def client(epoch: int = 2, token: str = "secret", attempt: int = 1) -> EngineClient:
        lease = Lease(role="rollout", epoch=epoch, url=url, pid=1, node="here", flow_run_id="f")
        return EngineClient(lease, token=token, attempt=attempt)

    client.told = told  # pyright: ignore[reportFunctionMemberAccess]
    yield client, ran
    server.shutdown()
    thread.join(10)
    assert not thread.is_alive()


def test_nothing_answers_without_the_campaigns_token(engine):
    client, _ = engine
    url = client().lease.url
    assert url.startswith("http://127.0.0.1:")
    job = {"id": "a", "method": "echo", "params": {}}
    guarded = [("GET", "/health"), ("POST", "/jobs"), ("GET", "/jobs/a"), ("DELETE", "/jobs/a"), ("POST", "/shutdown")]
    for headers in ({}, {"authorization": "secret"}, {"authorization": "Bearer Secret"}):
        for verb, path in guarded:
            assert httpx.request(verb, url + path, headers=headers, json=job).status_code == 401, path
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert httpx.get(url + path).status_code == 404


def test_result_and_idempotence(engine):
    client, ran = engine

    async def go():
        async with client() as c:
            first = await c.call("echo", {"x": 1}, job_id="a", deadline_s=5)
            again = await c.call("echo", {"x": 1}, job_id="a", deadline_s=5)
            assert first == again == {"echo": {"x": 1}}
            assert (await c.health())["version"] == 5

    asyncio.run(go())
    assert ran == ["a"]


def test_failure_is_told_and_may_be_retried(engine):
    client, ran = engine

    async def go():
        async with client() as c:
            for _ in range(2):
                with pytest.raises(JobFailed, match="ValueError: the shard is empty"):
                    await c.call("fail", {}, job_id="b", deadline_s=5)

    asyncio.run(go())
    assert ran == ["b", "b"]


def test_deadline_cancels_the_job(engine):
    client, _ = engine

    async def go():
        async with client() as c:
            with pytest.raises(JobDeadline, match=r"did not finish in 0 s .*groups"):
                await c.call("wait", {}, job_id="c", deadline_s=0.3)
            assert await c.call("echo", {}, job_id="d", deadline_s=5) == {"echo": {}}

    asyncio.run(go())


def test_cancelling_the_caller_cancels_the_job(engine):
    client, _ = engine

    async def go():
        async with client() as c:
            call = asyncio.create_task(c.call("wait", {}, job_id="e", deadline_s=30))
            await asyncio.sleep(0.3)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            started = time.monotonic()
            await c.call("echo", {}, job_id="f", deadline_s=5)
            assert time.monotonic() - started < 2

    asyncio.run(go())


def test_who_follows_a_job_hears_of_its_figures_at_once(engine):
    client, _ = engine

    async def go():
        async with client() as c:
            await c.call(
                "count", {}, job_id="n", deadline_s=20, on_progress=lambda p: client.told[int(p["groups"])].set()
            )

    asyncio.run(go())


def test_fences(engine):
    client, _ = engine

    async def go():
        async with client(token="guess") as c:
            with pytest.raises(JobFailed, match="token"):
                await c.health()
        async with client(epoch=1) as c:
            with pytest.raises(EngineLost, match="epoch 2"):
                await c.health()
        async with client(attempt=2) as c:
            await c.health()
        async with client(attempt=1) as c:
            with pytest.raises(Fenced):
                await c.health()

    asyncio.run(go())


def test_nobody_there_is_engine_lost():
    lease = Lease(role="actor", epoch=1, url="http://127.0.0.1:9", pid=1, node="here", flow_run_id="f")

    async def go():
        async with EngineClient(lease, token="t", attempt=1) as c:
            with pytest.raises(EngineLost, match="does not answer"):
                await c.health()

    asyncio.run(go())


def test_an_idle_engine_leaves(tmp_path):
    server = JobServer(lambda job: {}, role="actor", epoch=1, token="t", idle_limit_s=0.2)
    thread = threading.Thread(target=server.run, args=(tmp_path / "endpoint",), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_leaves_is_lost_to_who_waits_for_its_jobs(engine):
    """It ends what it was at, so that a job of it may end as cancelled before it is gone; nobody has cancelled that."""
    client, _ = engine

    async def run():
        async with client() as c, client() as other:
            for id in ("running", "queued"):  # the server has one worker
                await c._request("POST", "/jobs", json={"id": id, "method": "wait", "params": {}})
            jobs = [asyncio.create_task(c.call("wait", {}, job_id=id, deadline_s=10)) for id in ("running", "queued")]
            async with asyncio.timeout(10):
                while (await other.health())["running"] != ["running"]:
                    await asyncio.sleep(0.02)
            await other.shutdown()
            with pytest.raises(EngineLost):
                await other.call("wait", {}, job_id="late", deadline_s=10)
            for job in jobs:
                with pytest.raises(EngineLost):
                    await job

    asyncio.run(run())


@pytest.mark.parametrize("method", ["exchange", "wait"])
def test_a_newer_attempt_ends_what_needs_the_older_ones_other_side(engine, method: str):
    """Else its own would wait behind it, until a deadline that is meant for a slow network. Other jobs go on."""
    client, ran = engine

    async def run():
        async with client(attempt=1) as old, client(attempt=2) as new:
            # It asks, and is killed: nobody cancels the job.
            await old._request("POST", "/jobs", json={"id": "old", "method": method, "params": {}})
            began = time.monotonic()
            await new.health()
            if method == "wait":
                await asyncio.sleep(0.3)
                assert (await new.health())["running"] == ["old"]
            else:
                assert await new.call("echo", {"n": 1}, job_id="new", deadline_s=10) == {"echo": {"n": 1}}
                assert ran == ["old", "new"] and time.monotonic() - began < 5

    asyncio.run(run())
