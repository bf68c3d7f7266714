"""SGLang's engine in this process: ``python -m headrace.engines.rollout.sglang_child FD OPTIONS ARGUMENTS``.

Runs in SGLang's environment. FD is the host's socket, OPTIONS JSON for ``child.Program``, ARGUMENTS JSON of SGLang's
``ServerArgs``. There is no HTTP server.
"""

import asyncio
import gc
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.engines.rollout.child import Heard, Program, Refused, Sampling, connect, refuse

INTERVAL = 32
"""Tokens of a request between two messages of the engine; what is lost at most when it dies."""


class SGLang:
    """Implements ``child.Backend``."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Starts the engine; blocks for that long. Call it inside the event loop."""
        import sglang
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.managers import io_struct, tokenizer_manager

        self._io = io_struct
        # What a request raises that is dropped before it reached the scheduler; older versions have no such error.
        self._dropped: Any = getattr(tokenizer_manager, "RequestAbortedError", ())
        self._deterministic = arguments.get("enable_deterministic_inference", False)
        self._ranks = arguments["tp_size"]
        self._engine = Engine(**arguments, stream_interval=INTERVAL, incremental_streaming_output=True)
        self._manager: Any = self._engine.tokenizer_manager
        self._version = sglang.__version__
        self._adapter: str | None = None
        """Name of the LoRA adapter that is served."""
        self._adapters = itertools.count(1)
        gc.collect()
        gc.freeze()

    def describe(self) -> dict[str, Any]:
        return {"engine": f"sglang {self._version}", "version": self._version}

    async def complete(self, name: str, prompt_ids: list[int], sampling: Sampling, heard: Heard) -> str:
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": True,  # what ends a sample is said here, not in the model folder
        }
        if self._deterministic:
            parameters["sampling_seed"] = sampling.seed >> 33  # SGLang takes 31 bits
        request = self._io.GenerateReqInput(
            input_ids=prompt_ids,
            sampling_params=parameters,
            return_logprob=True,
            stream=True,
            rid=name,
            extra_key=sampling.salt or None,
            lora_path=self._adapter,
        )
        try:
            async for output in self._manager.generate_request(request, None):
                about = output["meta_info"]
                tokens = list(output.get("output_ids") or [])
                entries = about.get("output_token_logprobs") or []
                if [entry[1] for entry in entries] != tokens:
                    what = f"SGLang gave log-probabilities of {len(entries)} tokens for {len(tokens)} sampled ones"
                    raise Refused("WrongLogprobs", what)
                heard(tokens, [entry[0] for entry in entries])
                if (reason := about.get("finish_reason")) is not None:
                    return reason["type"]
        except self._dropped:
            return "abort"
        except asyncio.CancelledError:
            self._manager.abort_request(rid=name)
            raise
        return "abort"

    async def drop(self, names: list[str]) -> None:
        for name in names:
            self._manager.abort_request(rid=name)

    async def join(self, source: str, expect: str, deadline_s: str) -> None:
        """Not here: SGLang's workers run nothing of ours beside their loop."""

    async def load(self, source: str, expect: str, deadline_s: str) -> list[dict[str, Any]]:
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        from headrace.engines.rollout.sglang_worker import LOADER, order

        with tempfile.TemporaryDirectory(prefix="headrace-sglang-") as folder:
            outcome = Path(folder) / "outcome"
            # File descriptors, torch's default, do not reach SGLang's processes.
            torch.multiprocessing.set_sharing_strategy("file_system")
            payload = MultiprocessingSerializer.serialize(order(source, expect, deadline_s, outcome))
            update = self._io.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * self._ranks, load_format=LOADER, flush_cache=True
            )
            if hasattr(self._manager, "begin_weight_update"):  # SGLang 0.5.23 wants a session around an update
                await self._manager.begin_weight_update(self._io.BeginWeightUpdateReqInput(), None)
            done, message = (await self._manager.update_weights_from_tensor(update, None))[:2]
            if hasattr(self._manager, "end_weight_update"):
                await self._manager.end_weight_update(self._io.EndWeightUpdateReqInput(), None)
            files = sorted(Path(folder).glob("outcome.*"))
            if not done or len(files) != self._ranks:
                return [{"error": f"SGLang did not load: {message}", "spoiled": True}]
            return [json.loads(file.read_text()) for file in files]

    async def load_adapter(self, path: str, version: int) -> None:
        name = f"v{version}-{next(self._adapters)}"
        done = await self._manager.load_lora_adapter(self._io.LoadLoRAAdapterReqInput(lora_name=name, lora_path=path))
        if not done.success:
            raise RuntimeError(done.error_message)
        before, self._adapter = self._adapter, name
        if before is not None:
            await self._manager.unload_lora_adapter(self._io.UnloadLoRAAdapterReqInput(lora_name=before))

    async def reset_caches(self) -> None:
        await self._manager.flush_cache()

    async def sleep(self, level: int) -> None:
        tags = ["kv_cache"] if level == 1 else ["kv_cache", "weights"]
        await self._manager.release_memory_occupation(self._io.ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def wake(self) -> None:
        await self._manager.resume_memory_occupation(self._io.ResumeMemoryOccupationReqInput(), None)

    async def health(self) -> None:
        if self._manager.gracefully_exit:
            raise Refused("EngineDied", "SGLang is shutting down")

    def close(self) -> None:
        self._engine.shutdown()


def missing() -> list[str]:
    """What this SGLang lacks of what is used here."""
    from inspect import signature

    from sglang.srt.managers import io_struct
    from sglang.srt.server_args import ServerArgs

    wanted: list[tuple[Any, list[str]]] = [
        (ServerArgs, ["custom_weight_loader", "incremental_streaming_output", "stream_interval"]),
        (io_struct.GenerateReqInput, ["extra_key", "return_logprob", "rid"]),
        (io_struct.UpdateWeightsFromTensorReqInput, ["load_format", "serialized_named_tensors"]),
    ]
    return [f"{kind.__name__}({n}=)" for kind, names in wanted for n in names if n not in signature(kind).parameters]


async def _serve(fd: int, options: dict[str, Any], arguments: dict[str, Any]) -> int:
    sock = connect(fd)
    try:
        import sglang
    except ModuleNotFoundError as error:
        return refuse(sock, Refused("MissingPackage", f"{sys.executable} cannot import sglang: {error}"))
    if lacks := missing():
        what = f"sglang {sglang.__version__} lacks {', '.join(lacks)}, which this back end needs"
        return refuse(sock, Refused("UnsupportedEngine", what))
    backend = SGLang(arguments)
    try:
        await Program(backend, options).serve(sock)
        return 0
    except Refused as error:
        print(f"{error.kind}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        backend.close()


def main() -> int:
    """Exit status 0 when the host closed, 1 with a reason for it in the log otherwise."""
    return asyncio.run(_serve(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])))


if __name__ == "__main__":
    sys.exit(main())
