"""vLLM's scheduler, with what it says about our requests held back until there is more to say.

Runs in vLLM's engine process; ``scheduler_cls`` is vLLM's plug-in point for it. A message about a request costs tens
of microseconds, most of them for log-probabilities, on both sides of vLLM's socket: one for each token limits the
throughput long before a large GPU does. Requests of the OpenAI-compatible door are not held.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]

HOLD = 32
"""Tokens of a request between two messages; as many are lost at most when the engine dies or new weights come."""


@dataclass
class _Held:
    first: Any
    """The first output; later ones of a request say nothing about its prompt."""
    tokens: list[int]
    logprobs: list[Any]
    """vLLM's LogprobsLists of each output."""


class _Holding:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Outputs by client, without those that are held."""
        made = super().update_from_output(scheduler_output, model_runner_output)  # pyright: ignore
        for client, batch in list(made.items()):
            batch.outputs = [told for one in batch.outputs if (told := self._pass(one)) is not None]
            if not batch.outputs and batch.scheduler_stats is None and not batch.finished_requests:
                del made[client]
        return made

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Also forgets what is held of requests that are dropped."""
        finished = super().finish_requests(*args, **kwargs)  # pyright: ignore
        self._held = {name: held for name, held in self._held.items() if name in self.requests}  # pyright: ignore
        return finished

    def _pass(self, output: Any) -> Any:
        """The output, with what was held before it; None when it is held itself."""
        name = output.request_id
        held = self._held.get(name)
        if held is None:
            request = self.requests.get(name)  # pyright: ignore[reportAttributeAccessIssue]
            ours = request is not None and request.sampling_params is not None and request.sampling_params.flat_logprobs
            if not ours or output.finished or output.new_logprobs is None:
                return output
            held = self._held[name] = _Held(output, [], [])
        held.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            held.logprobs.append(output.new_logprobs)
        if len(held.tokens) < HOLD and not output.finished:
            return None
        del self._held[name]
        output.new_token_ids = held.tokens
        output.prefill_stats = held.first.prefill_stats
        output.new_logprobs = held.logprobs[0]._replace(
            logprob_token_ids=np.concatenate([one.logprob_token_ids for one in held.logprobs]),
            logprobs=np.concatenate([one.logprobs for one in held.logprobs]),
            sampled_token_ranks=np.concatenate([one.sampled_token_ranks for one in held.logprobs]),
        )
        return output


class HoldingScheduler(_Holding, Scheduler):
    """For steps one after another."""


class HoldingAsyncScheduler(_Holding, AsyncScheduler):
    """For steps that are scheduled while the one before runs."""


HOLDING = {
    Scheduler: f"{__name__}.{HoldingScheduler.__name__}",
    AsyncScheduler: f"{__name__}.{HoldingAsyncScheduler.__name__}",
}
"""By the class that vLLM would take."""
