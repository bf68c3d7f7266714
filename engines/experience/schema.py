"""The one schema of experience: every column that a stage may write, with its unit and nullability.

A stage appends columns: it writes one Arrow file that holds ``uid`` and its own columns, never those of another stage.
One row is one sample (one trajectory). Lists over tokens cover the response only and are equally long in every file.
"""

import pyarrow as pa

tokens = pa.list_(pa.field("item", pa.int32(), nullable=False))
floats = pa.list_(pa.field("item", pa.float32(), nullable=False))
bits = pa.list_(pa.field("item", pa.uint8(), nullable=False))
spans = pa.list_(
    pa.field(
        "item",
        pa.struct([pa.field("version", pa.int64(), nullable=False), pa.field("tokens", pa.int32(), nullable=False)]),
        nullable=False,
    )
)


def _field(name: str, kind: pa.DataType, meaning: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning})


UID = _field("uid", pa.string(), "sample id, '<group_id>-<sample>'; unique in the campaign")

PROMPTS = pa.schema(
    [
        _field("group_id", pa.int64(), "place of the prompt in the campaign's data order; one group is trained once"),
        _field("prompt_id", pa.string(), "id of the prompt in its data set"),
        _field("messages", pa.string(), "chat messages as JSON: [{'role', 'content'}, …]"),
        _field("ground_truth", pa.string(), "what the reward compares with, as JSON"),
    ]
)

GENERATE = pa.schema(
    [
        UID,
        _field("group_id", pa.int64(), "see prompts"),
        _field("prompt_id", pa.string(), "see prompts"),
        _field("sample", pa.int32(), "0 … n-1 inside the group"),
        _field("prompt_ids", tokens, "token ids of the rendered prompt"),
        _field("response_ids", tokens, "token ids after the prompt, stop token included"),
        _field(
            "response_mask", bits, "1 where the policy sampled the token, 0 where a tool or the environment wrote it"
        ),
        _field(
            "behaviour_logprobs",
            floats,
            "log-probability (nats) of each sampled token, after temperature; 0 where mask is 0",
        ),
        _field("weight_spans", spans, "run-length: weight version, number of tokens"),
        _field("finish_reason", pa.string(), "stop | length | abort"),
        _field("turns", pa.int32(), "assistant turns"),
        _field("seed", pa.uint64(), "seed of the sample's random numbers"),
        _field("prompt_text", pa.string(), "the rendered prompt, for people"),
        _field("text", pa.string(), "the decoded response without special tokens, for rewards and people"),
        _field("ground_truth", pa.string(), "see prompts"),
    ]
)

SCORE = pa.schema(
    [
        UID,
        _field("reward", pa.float32(), "null = scoring failed, which is not 0", nullable=True),
        _field("reward_parts", pa.map_(pa.string(), pa.float32()), "named parts of the reward"),
        _field("score_error", pa.string(), "why scoring failed", nullable=True),
    ]
)

OLD_LOGPROB = pa.schema([UID, _field("old_logprobs", floats, "trainer's own log-probability (nats) before the step")])
REF_LOGPROB = pa.schema([UID, _field("ref_logprobs", floats, "reference model's log-probability (nats)")])

ADVANTAGE = pa.schema(
    [
        UID,
        _field("advantages", floats, "advantage of each token; NaN = not trained on, though its sample is"),
        _field("accepted", pa.bool_(), "False: the sample is in neither loss nor denominators"),
        _field("drop_reason", pa.string(), "why it was not accepted", nullable=True),
    ]
)

STAGES: dict[str, pa.Schema] = {
    "prompts": PROMPTS,
    "generate": GENERATE,
    "score": SCORE,
    "old-logprob": OLD_LOGPROB,
    "ref-logprob": REF_LOGPROB,
    "advantage": ADVANTAGE,
}
"""The file that each stage writes. The semantics of sampling and the engine fingerprint are in the schema metadata."""
