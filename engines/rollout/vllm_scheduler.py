"""vLLM's scheduler, with what it says about our requests held back until there is more to say.

Runs in vLLM's engine process; ``scheduler_cls`` is vLLM's plug-in point for it. A message about a request costs tens
of microseconds, most of them for log-probabilities, on both sides of vLLM's socket: one for each token limits the
throughput long before a large GPU does. Requests of the OpenAI-compatible door are not held.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager  # pyright: ignore[reportMissingImports]
from vllm.v1.outputs import LogprobsLists  # pyright: ignore[reportMissingImports]

HOLD = 32
"""Tokens of a request between two messages; as many are lost at most when the engine dies or new weights come."""


@dataclass
class _Held:
    first: Any
    """The first output; later ones of a request say nothing about its prompt."""
    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """The token of each log-probability, as vLLM says it: the front end compares."""
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


class _Holding:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}
        self._others: set[str] = set()
        """Requests that are not ours."""
        _quicken(self.kv_cache_manager)  # pyright: ignore[reportAttributeAccessIssue]

    def add_request(self, request: Any) -> None:
        """Also notes whether it is ours."""
        if not _ours(request):
            self._others.add(request.request_id)
        super().add_request(request)  # pyright: ignore[reportAttributeAccessIssue]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Outputs by client, without those that are held."""
        self._others &= self.requests.keys()  # pyright: ignore[reportAttributeAccessIssue]
        logprobs = model_runner_output.logprobs
        whole = logprobs is not None and not self._others and logprobs.cu_num_generated_tokens is None
        if whole:  # one conversion of the step's columns costs less than arrays for every request
            columns = [c.tolist() for c in (logprobs[0][:, 0], logprobs[1][:, 0], logprobs[2])]
            model_runner_output.logprobs = None
        made = super().update_from_output(scheduler_output, model_runner_output)  # pyright: ignore
        for client, batch in list(made.items()):
            if whole:
                row_of = model_runner_output.req_id_to_index
                told = [self._pass_rows(one, columns, row_of.get(one.request_id, 0)) for one in batch.outputs]
            else:
                told = [self._pass(one) for one in batch.outputs]
            batch.outputs = [one for one in told if one is not None]
            if not batch.outputs and batch.scheduler_stats is None and not batch.finished_requests:
                del made[client]
        return made

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Also forgets what is held of requests that are dropped."""
        finished = super().finish_requests(*args, **kwargs)  # pyright: ignore
        self._held = {name: held for name, held in self._held.items() if name in self.requests}  # pyright: ignore
        return finished

    def _pass_rows(self, output: Any, columns: list[list[Any]], row: int) -> Any:
        """The output, with what was held before it; None when it is held itself. row: of its first token's figures."""
        held = self._held.get(output.request_id)
        if held is None:
            held = self._held[output.request_id] = _Held(output)
        ids, logprobs, ranks = columns
        for token in output.new_token_ids:
            held.tokens.append(token)
            held.ids.append(ids[row])
            held.logprobs.append(logprobs[row])
            held.ranks.append(ranks[row])
            row += 1
        return self._tell(output, held)

    def _pass(self, output: Any) -> Any:
        """As ``_pass_rows``, for an output that has its own log-probabilities, and perhaps is not ours."""
        held = self._held.get(output.request_id)
        if held is None:
            request = self.requests.get(output.request_id)  # pyright: ignore[reportAttributeAccessIssue]
            if request is None or not _ours(request) or output.finished or output.new_logprobs is None:
                return output
            held = self._held[output.request_id] = _Held(output)
        held.tokens += output.new_token_ids
        if (new := output.new_logprobs) is not None:
            held.ids += new[0][:, 0].tolist()
            held.logprobs += new[1][:, 0].tolist()
            held.ranks += new[2].tolist()
        return self._tell(output, held)

    def _tell(self, output: Any, held: _Held) -> Any:
        if len(held.tokens) < HOLD and not output.finished:
            return None
        del self._held[output.request_id]
        output.new_token_ids = held.tokens
        output.prefill_stats = held.first.prefill_stats
        if held.tokens:
            column = [np.array(held.ids)[:, None], np.array(held.logprobs, np.float32)[:, None], np.array(held.ranks)]
            output.new_logprobs = LogprobsLists(*column)
        return output


def _ours(request: Any) -> bool:
    return request.sampling_params is not None and request.sampling_params.flat_logprobs


def _quicken(manager: Any) -> None:
    """Spares a request that decodes the search for new blocks while its last block has room: 15 steps of 16.

    The search is a quarter of what vLLM 0.26 does between two steps of a small model. Only where nothing depends on
    it: one group of layers that see everything, and no prefix cache.
    """
    managers = getattr(manager.coordinator, "single_type_managers", ())
    if manager.enable_caching or len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return
    [only] = managers
    allocate = manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        blocks = only.req_to_blocks.get(request.request_id)
        if blocks and not more:
            end = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if end <= len(blocks) * only.block_size:
                return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    manager.allocate_slots = allocate_slots


class HoldingScheduler(_Holding, Scheduler):
    """For steps one after another."""


class HoldingAsyncScheduler(_Holding, AsyncScheduler):
    """For steps that are scheduled while the one before runs."""


HOLDING = {
    Scheduler: f"{__name__}.{HoldingScheduler.__name__}",
    AsyncScheduler: f"{__name__}.{HoldingAsyncScheduler.__name__}",
}
"""By the class that vLLM would take."""
