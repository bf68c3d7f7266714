"""vLLM's ``AsyncLLM`` in this process: ``python -m headrace.engines.rollout.vllm_child FD OPTIONS FLAG…``.

Runs in vLLM's environment. FD is the host's socket; OPTIONS is JSON (see ``child.Program`` and ``main``); the flags
are those of ``vllm serve``. Needs no HTTP server: its front end halves the throughput when log-probabilities are asked
for. With ``door_fd`` in the options the OpenAI-compatible server is opened on that socket, for agents and judges.
"""

import asyncio
import gc
import itertools
import json
import os
import sys
from typing import Any

from headrace.engines.rollout.child import Heard, Program, Refused, Sampling, connect, refuse

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""Environment variable: how vLLM makes its processes."""


class VLLM:
    """Implements ``child.Backend``."""

    def __init__(self, flags: list[str], options: dict[str, Any]) -> None:
        """Starts the engine; blocks for that long."""
        from vllm import SamplingParams, __version__
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from headrace.engines.rollout.vllm_scheduler import HOLD, HOLDING

        self.flags = flags
        self._options = options
        args = AsyncEngineArgs.from_cli_args(_parser(AsyncEngineArgs).parse_args(flags))
        args.disable_log_stats = True
        # The tokenizer is on the host's side; here only the door needs it.
        args.skip_tokenizer_init = "door_fd" not in options
        method = os.environ.get(START_METHOD)
        config = args.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT)
        if method:  # vLLM's CPU platform changes it; we bind no threads, so nothing depends on a fresh process
            os.environ[START_METHOD] = method
        scheduler = config.scheduler_config
        if (holding := HOLDING.get(scheduler.get_scheduler_cls())) is not None:
            scheduler.scheduler_cls = holding
        else:  # a scheduler for some special model: only the front end's messages are fewer
            scheduler.stream_interval = HOLD
        self.llm = AsyncLLM.from_vllm_config(config, usage_context=UsageContext.ENGINE_CONTEXT, disable_log_stats=True)
        self._params, self._delta = SamplingParams, RequestOutputKind.DELTA
        self._version = __version__
        self._adapter: Any = None
        """vLLM's LoRARequest of the adapter that is served."""
        self._adapters = itertools.count(1)
        self._empty: bool = options["empty"]
        """Whether the weights are still those that vLLM made up at the start."""
        # What lives now lives on: the collector need not look at it between two tokens.
        gc.collect()
        gc.freeze()

    def describe(self) -> dict[str, Any]:
        return {"engine": f"vllm {self._version}", "version": self._version}

    async def complete(self, name: str, prompt_ids: list[int], sampling: Sampling, heard: Heard) -> str:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        params = self._params(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed >> 1,  # vLLM takes 63 bits
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=True,  # what ends a sample is said here, not in the model folder
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._delta,
        )
        prompt = tokens_input(prompt_ids, cache_salt=sampling.salt or None)
        try:
            async for output in self.llm.generate(prompt, params, name, lora_request=self._adapter):
                [answer] = output.outputs
                heard(*_said(answer))
                if answer.finish_reason is not None:
                    return answer.finish_reason
        except EngineDeadError as error:
            raise Refused("EngineDied", f"vLLM's engine process died: {error}") from error
        return "abort"

    async def open(self) -> None:
        """Nothing is sampled from weights that are made up: requests of the door wait for the first load."""
        if self._empty:
            await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def drop(self, names: list[str]) -> None:
        await self.llm.abort(names)

    async def join(self, source: str, expect: str, deadline_s: str) -> None:
        arguments = {"source": source, "expect": expect, "deadline_s": deadline_s}
        await self.llm.collective_rpc("headrace_join", kwargs=arguments)

    async def load(self, source: str, expect: str, deadline_s: str) -> list[dict[str, Any]]:
        # Requests of the door are not ours to drop: they are frozen, and computed again after the update; caches are
        # cleared here as well.
        # As pause_generation, without the 20 ms that it then sleeps for callers who want the last outputs first.
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        arguments = {"source": source, "expect": expect, "deadline_s": deadline_s}
        try:
            outcomes = await self.llm.collective_rpc("headrace_load_weights", kwargs=arguments)
            self._empty = self._empty and any("error" in outcome for outcome in outcomes)
            return outcomes
        finally:
            if not self._empty:
                await self.llm.engine_core.resume_scheduler_async()

    async def load_adapter(self, path: str, version: int) -> None:
        from vllm.lora.request import LoRARequest

        number = next(self._adapters)
        adapter = LoRARequest(lora_name=f"v{version}-{number}", lora_int_id=number, lora_path=path)
        await self.llm.add_lora(adapter)
        before, self._adapter = self._adapter, adapter
        if before is not None:
            await self.llm.remove_lora(before.lora_int_id)

    async def reset_caches(self) -> None:
        await self.llm.reset_prefix_cache()

    async def sleep(self, level: int) -> None:
        await self.llm.sleep(level)

    async def wake(self) -> None:
        await self.llm.wake_up()

    async def health(self) -> None:
        await self.llm.check_health()

    def close(self) -> None:
        self.llm.shutdown()


def _said(answer: Any) -> tuple[list[int], list[float]]:
    """New token ids of a vLLM ``CompletionOutput`` (delta, flat log-probabilities), and their log-probabilities.

    Raises:
        Refused: they are those of other tokens.
    """
    tokens = list(answer.token_ids)
    if not tokens or not answer.logprobs:
        return tokens, []
    # vLLM 0.26 says with an abort, and with the tokens that it was merged with, every log-probability once more.
    if answer.logprobs.token_ids[: len(tokens)] != tokens:
        raise Refused("WrongLogprobs", "vLLM gave log-probabilities of other tokens than it sampled")
    return tokens, answer.logprobs.logprobs[: len(tokens)]


def _parser(kind: Any) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return kind.add_cli_args(FlexibleArgumentParser())


def missing() -> list[str]:
    """What this vLLM lacks of what is used here; an import error is raised as it is."""
    from inspect import signature

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    wanted: list[tuple[Any, list[str]]] = [
        (SamplingParams, ["seed", "stop_token_ids", "logprobs", "flat_logprobs", "detokenize", "output_kind"]),
        (AsyncEngineArgs, ["worker_extension_cls", "logprobs_mode", "skip_tokenizer_init"]),
    ]
    lacks = [
        f"{kind.__name__}({name}=)"
        for kind, names in wanted
        for name in names
        if name not in signature(kind).parameters
    ]
    methods = [
        "abort",
        "add_lora",
        "remove_lora",
        "collective_rpc",
        "reset_prefix_cache",
        "check_health",
    ]
    lacks += [f"AsyncLLM.{name}" for name in methods if not hasattr(AsyncLLM, name)]
    controls = ["pause_scheduler_async", "resume_scheduler_async"]
    return lacks + [f"AsyncMPClient.{name}" for name in controls if not hasattr(AsyncMPClient, name)]


async def _serve(kind: type[VLLM], fd: int, options: dict[str, Any], flags: list[str]) -> int:
    sock = connect(fd)
    try:
        import vllm
    except ModuleNotFoundError as error:
        return refuse(sock, Refused("MissingPackage", f"{sys.executable} cannot import vllm: {error}"))
    if lacks := missing():
        what = f"vllm {vllm.__version__} lacks {', '.join(lacks)}, which this back end needs"
        return refuse(sock, Refused("UnsupportedEngine", what))
    backend = kind(flags, options)
    try:
        await backend.open()
        serving = [asyncio.create_task(Program(backend, options).serve(sock))]
        if "door_fd" in options:
            from headrace.engines.rollout.vllm_door import serve_door

            serving.append(asyncio.create_task(serve_door(backend.llm, flags, options)))
        ended, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        return 0
    except Refused as error:
        print(f"{error.kind}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        backend.close()


def main(kind: type[VLLM] = VLLM) -> int:
    """Exit status 0 when the host closed, 1 with a reason for it in the log otherwise."""
    return asyncio.run(_serve(kind, int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]))


if __name__ == "__main__":
    sys.exit(main())
