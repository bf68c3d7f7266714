"""The vLLM server as a child process: started with another interpreter, reached through a private unix socket."""

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx

import headrace
from headrace.blocks.recipe import VLLMRollout
from headrace.engines.process import Child, describe_exit
from headrace.engines.rollout.errors import EngineDied
from headrace.engines.rollout.spec import RolloutSpec

START_DEADLINE_S = 900.0
"""Seconds until the server must be healthy: large models load and compile for minutes."""
HEALTH_EVERY_S = 5.0
HEALTH_DEADLINE_S = 60.0
"""A server that does not answer ``/health`` for so long is dead, though its process may live."""
MIN_BATCHED_TOKENS = 2048
MODEL_NAME = "policy"


class VLLMServer:
    """One server process. Its socket lies in a folder of mode 0700: vLLM's own key guards only a part of its routes."""

    def __init__(self, spec: RolloutSpec, log_dir: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-vllm-"))
        # The interpreter must find our package, and nothing else of our environment.
        (self._folder / "path").mkdir()
        (self._folder / "path" / "headrace").symlink_to(Path(headrace.__file__).resolve().parent)
        socket = self._folder / "server.sock"
        self.flags = flags(spec)
        command = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model, "--uds", str(socket)]
        self._child = Child(
            [*command, *self.flags],
            log=log_dir / "vllm.log",
            env=_environment(spec, self._folder / "path"),
            grace_s=10.0,
        )
        self.http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None)),
            base_url="http://vllm",
            timeout=httpx.Timeout(30.0),
        )

    async def ready(self) -> None:
        """Returns when the server is healthy. Raises EngineDied when it ends first, or is not healthy in time."""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                while not await self._answers():
                    if (code := await asyncio.to_thread(self._child.wait, 0.5)) is not None:
                        raise EngineDied(f"vLLM ended while it started ({describe_exit(code)}). {self.last_lines()}")
        except TimeoutError as error:
            raise EngineDied(f"vLLM was not healthy after {START_DEADLINE_S:.0f} s. {self.last_lines()}") from error

    async def watch(self) -> None:
        """Returns never; raises EngineDied when the server ends or is silent for too long."""
        silent = 0.0
        while silent < HEALTH_DEADLINE_S:
            if (code := await asyncio.to_thread(self._child.wait, HEALTH_EVERY_S)) is not None:
                raise EngineDied(f"vLLM ended ({describe_exit(code)}). {self.last_lines()}")
            silent = 0.0 if await self._answers() else silent + HEALTH_EVERY_S
        raise EngineDied(f"vLLM has not answered /health for {HEALTH_DEADLINE_S:.0f} s. {self.last_lines()}")

    async def post(
        self, path: str, body: Any = None, *, timeout_s: float | None = 60.0, params: dict[str, str] | None = None
    ) -> Any:
        """The JSON answer. timeout_s None: the caller bounds the wait, by ``watch``. Raises EngineDied."""
        try:
            answer = await self.http.post(path, json=body, params=params, timeout=timeout_s)
        except httpx.TransportError as error:
            raise EngineDied(f"vLLM does not answer {path} ({type(error).__name__}). {self.last_lines()}") from error
        if answer.status_code != 200:
            raise EngineDied(f"vLLM answered {answer.status_code} to {path}: {answer.text[:500]}. {self.last_lines()}")
        return answer.json() if answer.content else None

    async def version(self) -> str:
        return (await self.http.get("/version")).json()["version"]

    def last_lines(self) -> str:
        return f"Its last lines:\n{self._child.tail()}"

    async def stop(self) -> None:
        """Ends the server and everything that it started."""
        await self.http.aclose()
        await asyncio.to_thread(self._child.stop)
        await asyncio.to_thread(shutil.rmtree, self._folder, True)

    async def _answers(self) -> bool:
        try:
            return (await self.http.get("/health", timeout=HEALTH_EVERY_S)).status_code == 200
        except httpx.TransportError:
            return False


def flags(spec: RolloutSpec) -> list[str]:
    """Every setting that changes numbers is given, whatever vLLM's defaults are."""
    backend = spec.backend
    assert isinstance(backend, VLLMRollout)
    given = [
        "--served-model-name",
        MODEL_NAME,
        "--dtype",
        spec.dtype,
        "--max-model-len",
        str(backend.max_model_len),
        "--max-num-seqs",
        str(backend.max_num_seqs),
        "--tensor-parallel-size",
        str(max(spec.gpus, 1)),
        "--logprobs-mode",
        backend.logprobs_mode,
        "--generation-config",
        "vllm",
        "--enable-prefix-caching" if backend.enable_prefix_caching else "--no-enable-prefix-caching",
        "--enforce-eager" if backend.enforce_eager else "--no-enforce-eager",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        "--worker-extension-cls",
        "headrace.engines.rollout.vllm_worker.HeadraceWorker",
    ]
    # A seeded request that is prefilled in pieces kills vLLM 0.32 on CPUs: their generators have no offset.
    chunked = bool(spec.gpus) and backend.enable_chunked_prefill is not False
    given += ["--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill"]
    if not chunked:
        given += ["--max-num-batched-tokens", str(max(backend.max_model_len, MIN_BATCHED_TOKENS))]
    ahead = bool(spec.gpus) and backend.async_scheduling is not False
    given += ["--async-scheduling" if ahead else "--no-async-scheduling"]
    if spec.gpus:
        given += ["--gpu-memory-utilization", str(backend.gpu_memory_utilization)]
    elif backend.kv_cache_memory_bytes:
        given += ["--kv-cache-memory-bytes", str(backend.kv_cache_memory_bytes)]
    if spec.head_dtype == "float32":
        given += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
    return given


def _environment(spec: RolloutSpec, path: Path) -> dict[str, str]:
    variables = {
        "PYTHONPATH": str(path),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc
    }
    assert isinstance(spec.backend, VLLMRollout)
    if spec.backend.batch_invariant:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if not spec.gpus:
        variables |= {"OMP_NUM_THREADS": str(spec.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables
