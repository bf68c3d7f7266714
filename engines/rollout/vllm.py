"""The ``vllm`` back end: a client of a vLLM server in an environment of its own. Imports neither torch nor vllm."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from headrace.blocks.recipe import VLLMRollout
from headrace.blocks.weights import Served, WeightSource
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.rollout.base import START_VERSION, Completion, Group, Request
from headrace.engines.rollout.errors import EngineDied, NotServing, RequestTooLong
from headrace.engines.rollout.folder import parameter_shapes
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm_server import MODEL_NAME, VLLMServer

QUEUED = 2
"""Samples sent to the server for each that it decodes at a time: its queue never runs dry."""
LOAD_LIMIT_S = 3600.0
"""Longest time that a load of weights may take in all."""


class VLLMEngine:
    """Implements ``RolloutEngine``. Seeds are honoured, but rounding depends on what else is in the batch."""

    deterministic = False

    def __init__(self, spec: RolloutSpec, log_dir: Path) -> None:
        """Use ``start``."""
        assert isinstance(spec.backend, VLLMRollout)
        self._spec, self._log_dir = spec, log_dir
        self._max_len, self._max_seqs = spec.backend.max_model_len, spec.backend.max_num_seqs
        self._shapes = parameter_shapes(Path(spec.model))
        self._server = VLLMServer(spec, log_dir)
        self._engine_version = ""
        self._loading = asyncio.Lock()
        self._served: Served | None = None
        self._broken = ""
        self._spoiled = False

    @classmethod
    async def start(cls, spec: RolloutSpec, log_dir: Path) -> "VLLMEngine":
        """Starts the server and waits until it is healthy. Raises EngineDied, UnsupportedModel."""
        engine = cls(spec, log_dir)
        try:
            await engine._server.ready()
            engine._engine_version = await engine._server.version()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Group]:
        """See ``RolloutEngine.generate``.

        Raises:
            RequestTooLong: prompt and response do not fit into ``max_model_len``.
            NotServing: the last load of weights failed.
            EngineDied: the server ended or fell silent; the message has the end of its log.
        """
        self._check(requests)
        places = asyncio.Semaphore(QUEUED * self._max_seqs)
        groups = {asyncio.create_task(self._group(request, places)) for request in requests}
        watch = asyncio.create_task(self._server.watch())
        try:
            while groups:
                done, _ = await asyncio.wait({*groups, watch}, return_when=asyncio.FIRST_COMPLETED)
                if watch in done:
                    watch.result()
                finished = groups & done
                groups -= finished
                for group in finished:
                    yield group.result()
        finally:
            for task in (watch, *groups):
                task.cancel()  # closes the connection, which makes vLLM drop the request
            await asyncio.gather(watch, *groups, return_exceptions=True)

    async def pause(self, mode: str = "keep") -> None:
        """See ``RolloutEngine.pause``. What was cached is dropped; running requests compute it again."""
        await self._server.post("/pause", params={"mode": mode, "clear_cache": "true"}, timeout_s=LOAD_LIMIT_S)

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        await self._server.post("/resume")

    async def load_weights(self, source: WeightSource, *, deadline_s: float) -> Served:
        """See ``RolloutEngine.load_weights``. Every worker pulls on its own; they must agree on the digest."""
        async with self._loading:
            self._served, self._broken = None, f"version {source.version} was not loaded completely"
            if self._spoiled:
                await self._restart()
            began = time.monotonic()
            await self.pause("keep")
            served = await self._load(source, deadline_s)
            await self._server.post("/update_weight_version", {"new_version": str(source.version)})
            await self.resume()
            self._served = served.model_copy(update={"pause_seconds": time.monotonic() - began})
            self._broken = ""
            return self._served

    async def _load(self, source: WeightSource, deadline_s: float) -> Served:
        expect = {name: [self._spec.dtype, shape] for name, shape in self._shapes.items()}
        arguments = {
            "source": source.model_dump_json(),
            "expect": json.dumps(expect),
            "deadline_s": str(deadline_s),
        }
        self._spoiled = True  # until it is known better: the server may die under the load
        call = {"method": "headrace_load_weights", "kwargs": arguments}
        outcomes = (await self._server.post("/collective_rpc", call, timeout_s=LOAD_LIMIT_S))["results"]
        self._spoiled = any(outcome.get("spoiled") for outcome in outcomes)
        errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
        if errors:
            await self._server.post("/abort_requests", {})
            await self.resume()
            raise WeightError(errors[0])
        served = [Served.model_validate(outcome["served"]) for outcome in outcomes]
        if len({one.digest for one in served}) != 1:
            raise WeightError("vLLM's workers loaded different weights", version=source.version)
        return served[0]

    async def _restart(self) -> None:
        """A new server in place of one whose model is half loaded."""
        spoiled, self._server = self._server, VLLMServer(self._spec, self._log_dir)
        await spoiled.stop()
        await self._server.ready()
        self._spoiled = False

    async def served(self) -> Served | None:
        """See ``RolloutEngine.served``."""
        return self._served

    def fingerprint(self) -> dict[str, str]:
        """See ``RolloutEngine.fingerprint``."""
        return {
            "engine": f"vllm {self._engine_version}",
            "device": "cuda" if self._spec.gpus else "cpu",
            "threads": str(self._spec.threads),
            "head_dtype": self._spec.head_dtype,
            "flags": " ".join(self._server.flags),
        }

    async def watch(self) -> None:
        """See ``RolloutEngine.watch``. A server that is replaced on purpose is not lost."""
        while True:
            server = self._server
            try:
                await server.watch()
            except EngineDied:
                if server is self._server:
                    raise

    async def close(self) -> None:
        """Ends the server."""
        await self._server.stop()

    async def _group(self, request: Request, places: asyncio.Semaphore) -> Group:
        samples = [asyncio.create_task(self._sample(request, n, places)) for n in range(len(request.seeds))]
        try:
            return Group(request.group, list(await asyncio.gather(*samples)))
        finally:
            for task in samples:
                task.cancel()

    async def _sample(self, request: Request, sample: int, places: asyncio.Semaphore) -> Completion:
        sampling = request.sampling
        body = {
            "model": MODEL_NAME,
            "token_ids": list(request.prompt_ids),
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": request.seeds[sample] >> 1,  # vLLM takes 63 bits
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,  # what ends a sample is said here, not in the model folder
                "logprobs": 0,
            },
        }
        async with places:
            answer = await self._server.post("/inference/v1/generate", body, timeout_s=None)
        return _completion(answer["choices"][0], sample)

    def _check(self, requests: Sequence[Request]) -> None:
        if self._broken:
            raise NotServing(f"this engine serves no weights since a load failed: {self._broken}")
        for request in requests:
            prompt, answer = len(request.prompt_ids), request.sampling.max_tokens
            if not prompt or not request.seeds or answer < 1:
                raise ValueError(f"group {request.group}: a request needs a prompt, seeds and max_tokens ≥ 1")
            if prompt + answer > self._max_len:
                raise RequestTooLong(
                    f"group {request.group}: its prompt has {prompt} tokens and max_tokens is {answer}, but "
                    f"max_model_len is {self._max_len}; raise it, lower max_tokens or filter long prompts"
                )


def _completion(choice: dict[str, Any], sample: int) -> Completion:
    """vLLM's answer to one sample."""
    tokens = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in content] != tokens:
        raise EngineDied(f"vLLM gave log-probabilities of {len(content)} tokens for {len(tokens)} sampled ones")
    spans = [
        (START_VERSION if span["version"] == "default" else int(span["version"]), span["end"] - span["start"])
        for span in choice["weight_versions"] or []
    ]
    return Completion(sample, tokens, [entry["logprob"] for entry in content], choice["finish_reason"], spans)
