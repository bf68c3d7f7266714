"""A vLLM program with a planted fault: its prefix cache survives weight updates, salted only when that is wanted."""

import os
import sys
from dataclasses import replace
from typing import Any

from headrace.engines.rollout import vllm_child
from headrace.engines.rollout.child import Heard, Sampling


class ForgetfulVLLM(vllm_child.VLLM):
    async def reset_caches(self) -> None:
        """Does not."""

    async def load(self, source: str, expect: str, deadline_s: str) -> list[dict[str, Any]]:
        arguments = {"source": source, "expect": expect, "deadline_s": deadline_s}
        return await self.llm.collective_rpc("headrace_load_weights", kwargs=arguments)

    async def complete(self, name: str, prompt_ids: list[int], sampling: Sampling, heard: Heard) -> str:
        if os.environ["HEADRACE_TEST_SALT"] == "0":
            sampling = replace(sampling, salt="")
        return await super().complete(name, prompt_ids, sampling, heard)


if __name__ == "__main__":
    sys.exit(vllm_child.main(ForgetfulVLLM))
