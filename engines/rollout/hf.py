"""The ``transformers`` back end: decodes Hugging Face folders with torch, on CPU or one GPU, reproducibly."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from headrace import __version__
from headrace.blocks.recipe import TransformersRollout
from headrace.blocks.weights import Served, WeightSource
from headrace.engines.checkpoint import pull
from headrace.engines.rollout.architecture import read_architecture
from headrace.engines.rollout.base import START_VERSION, Group, Request
from headrace.engines.rollout.batch import Batch
from headrace.engines.rollout.decoder import Decoder
from headrace.engines.rollout.errors import NotServing, RequestTooLong
from headrace.engines.rollout.receipt import Receipt
from headrace.engines.rollout.slots import Storage
from headrace.engines.rollout.spec import RolloutSpec

PREFILL_TOKENS = 2048
"""Prompts are computed together up to this many tokens."""
PAUSE_LIMIT_S = 1800.0
"""A generation that was paused and not resumed fails after this."""

T = TypeVar("T")


class TransformersEngine:
    """Implements ``RolloutEngine``. Calls of ``generate`` run one after another: each is reproducible bit by bit.

    Everything that touches the model runs in one worker thread, one token at a time; between two tokens the event
    loop decides whether to go on, pause, load weights or stop.
    """

    deterministic = True
    door = ""

    def __init__(self, spec: RolloutSpec) -> None:
        """Loads the model; blocks for that long. Raises UnsupportedModel."""
        assert isinstance(spec.backend, TransformersRollout)
        self._spec = spec
        self._worker = ThreadPoolExecutor(1, "decode", torch.set_num_threads, (spec.threads,))
        self._calls, self._token, self._gate = asyncio.Lock(), asyncio.Lock(), asyncio.Condition()
        self._paused = False
        self._served: Served | None = None
        self._broken = ""
        self._batch: Batch | None = None
        self._sampled = 0
        self._worker.submit(self._load_model, spec.backend.max_batch).result()

    def _load_model(self, max_batch: int) -> None:
        dtype = getattr(torch, self._spec.dtype)
        head_dtype = torch.float32 if self._spec.head_dtype == "float32" else dtype
        device = torch.device("cuda" if self._spec.gpus else "cpu")
        folder = Path(self._spec.model)
        arch = read_architecture(folder)
        self.decoder = Decoder(arch, dtype=dtype, head_dtype=head_dtype, device=device, folder=folder)
        self._storage = Storage(arch, max_batch=max_batch, dtype=dtype, device=device)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Group]:
        """See ``RolloutEngine.generate``.

        Raises:
            RequestTooLong: prompt and response of a request do not fit into the model's context.
            NotServing: the last load of weights failed.
            NonFiniteLogits: the weights give no distribution.
        """
        self._check_lengths(requests)
        async with self._calls:
            if not requests:
                return
            if self._broken:
                raise NotServing(f"this engine serves no weights since a load failed: {self._broken}")
            version = self._served.version if self._served else START_VERSION
            batch = self._batch = Batch(
                self.decoder, self._storage, requests, version=version, prefill_tokens=PREFILL_TOKENS
            )
            try:
                while not batch.done:
                    await self._open_gate(batch)
                    async with self._token:
                        if self._broken:
                            raise NotServing(f"a load of weights failed under running requests: {self._broken}")
                        await self._do(batch.step)
                    for group in batch.take():
                        yield group
                for group in batch.take():
                    yield group
            finally:
                self._sampled += batch.tokens
                self._batch = None

    async def pause(self, mode: str = "keep") -> None:
        """See ``RolloutEngine.pause``."""
        if mode == "wait":
            async with self._calls:
                self._paused = True
            return
        self._paused = True
        async with self._token:  # the token under way is finished
            if mode == "abort" and self._batch is not None:
                await self._do(self._batch.abort)
        async with self._gate:
            self._gate.notify_all()

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        self._paused = False
        async with self._gate:
            self._gate.notify_all()

    async def load_weights(self, source: WeightSource, *, deadline_s: float) -> Served:
        """See ``RolloutEngine.load_weights``. Requests under way wait, then go on with the new weights."""
        async with self._token:
            return await self._do(lambda: self._load(source, deadline_s))

    def _load(self, source: WeightSource, deadline_s: float) -> Served:
        began = time.monotonic()
        parameters = self.decoder.parameters
        expect = {name: (self._spec.dtype, list(tensor.shape)) for name, tensor in parameters.named_tensors()}
        self._served, self._broken = None, f"version {source.version} was not loaded completely"
        receipt = Receipt(parameters.assign, parameters.place)
        device = str(self.decoder.device)
        served = pull(source, receipt, deadline_s=deadline_s, expect=expect, device=device, place=receipt.place)
        receipt.verify(parameters.named_tensors(), source.version)
        self.decoder.refresh()
        if self._batch is not None:
            self._batch.refresh(served.version)
        self._served = served.model_copy(update={"pause_seconds": time.monotonic() - began})
        self._broken = ""
        return self._served

    async def reset_caches(self) -> None:
        """See ``RolloutEngine.reset_caches``: nothing outlives the call that made it."""

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``: the slots are given back; weights stay, whatever the level."""
        await self.pause("wait")
        await self._do(self._storage.free)

    async def wake(self) -> None:
        """See ``RolloutEngine.wake``; slots are made again when they are needed."""
        await self.resume()

    async def metrics(self) -> dict[str, float]:
        """See ``RolloutEngine.metrics``."""
        batch = self._batch
        running, waiting = batch.load if batch is not None else (0, 0)
        return {"running": running, "waiting": waiting, "tokens": self._sampled + (batch.tokens if batch else 0)}

    async def served(self) -> Served | None:
        """See ``RolloutEngine.served``."""
        return self._served

    def fingerprint(self) -> dict[str, str]:
        """See ``RolloutEngine.fingerprint``."""
        device = self.decoder.device
        return {
            "engine": f"headrace-transformers {__version__}",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": self._spec.dtype,
            "head_dtype": self._spec.head_dtype,
            "logprobs_mode": "processed",
            "prefix_caching": "prompt of a group only",
            "max_batch": str(self._storage.max_batch),
            "threads": str(self._spec.threads),
        }

    async def watch(self) -> None:
        """See ``RolloutEngine.watch``: this engine dies only with its process."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Waits for the token under way and frees the worker."""
        await asyncio.to_thread(self._worker.shutdown)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def _open_gate(self, batch: Batch) -> None:
        if self._paused:
            async with self._gate, asyncio.timeout(PAUSE_LIMIT_S):
                await self._gate.wait_for(lambda: not self._paused or batch.done)

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        context = self.decoder.arch.context
        for request in requests:
            prompt, answer = len(request.prompt_ids), request.sampling.max_tokens
            if not prompt or not request.seeds or answer < 1:
                raise ValueError(f"group {request.group}: a request needs a prompt, seeds and max_tokens ≥ 1")
            if prompt + answer > context:
                raise RequestTooLong(
                    f"group {request.group}: its prompt has {prompt} tokens and max_tokens is {answer}, but the "
                    f"model's context is {context}; lower max_tokens or filter long prompts"
                )
