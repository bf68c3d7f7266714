"""What a job has sampled so far, in the store: another engine goes on from there when this one dies."""

import io
from collections.abc import Sequence

import pyarrow as pa

from headrace.engines.experience.schema import GENERATE
from headrace.engines.experience.store import NotInStore, Store
from headrace.engines.rollout.base import Completion, Request

COLUMNS = ("group_id", "sample", "response_ids", "behaviour_logprobs", "weight_spans", "finish_reason")
SCHEMA = pa.schema([GENERATE.field(name) for name in COLUMNS])
"""One row for each sample that has tokens; ``finish_reason`` is empty where it was under way."""


def path_of(stage: str, step: int, shard: int, key: str) -> str:
    """Where a job keeps it; the key is that of its manifest, so only the same work under the same weights goes on."""
    return f"experience/{step:06d}/begun-{stage}-{shard}-{key}.arrow"


def save(store: Store, path: str, requests: Sequence[Request]) -> None:
    """Replaces the file. Call it while nothing is added to the completions."""
    rows = [
        {
            "group_id": request.group,
            "sample": sample,
            "response_ids": completion.token_ids,
            "behaviour_logprobs": completion.logprobs,
            "weight_spans": [{"version": version, "tokens": tokens} for version, tokens in completion.weight_spans],
            # What was aborted is not finished: it goes on elsewhere.
            "finish_reason": completion.finish_reason.replace("abort", ""),
        }
        for request in requests
        for sample, completion in sorted(request.begun.items())
        if completion.token_ids
    ]
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    store.put(path, buffer.getbuffer())


def restore(store: Store, path: str, requests: Sequence[Request]) -> int:
    """Puts what an earlier engine sampled into ``Request.begun``; returns the number of its tokens."""
    try:
        table = pa.ipc.open_file(store.get(path)).read_all()
    except NotInStore:
        return 0
    known = {request.group: request for request in requests}
    tokens = 0
    for row in table.to_pylist():
        spans = [(span["version"], span["tokens"]) for span in row["weight_spans"]]
        completion = Completion(
            row["sample"], row["response_ids"], row["behaviour_logprobs"], row["finish_reason"], spans
        )
        known[row["group_id"]].begun[row["sample"]] = completion
        tokens += len(completion.token_ids)
    return tokens
