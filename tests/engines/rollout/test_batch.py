"""The decode path against transformers, and continuous batching against one sample at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engines.rollout.architecture import read_architecture
from headrace.engines.rollout.base import Completion, Request, Sampling
from headrace.engines.rollout.batch import Batch
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.decoder import Decoder
from headrace.engines.rollout.errors import UnsupportedModel
from headrace.engines.rollout.slots import Storage

FAMILIES = {
    "llama": {},
    "llama-bias": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}
PROMPTS = [[1, 40, 50, 60], [1, 7], [1, 9, 8, 100, 101, 102, 103, 104, 99], [1, 200, 201]]


def load(folder: Path, dtype: torch.dtype = torch.float32, head_dtype: torch.dtype | None = None) -> Decoder:
    arch = read_architecture(folder)
    return Decoder(arch, dtype=dtype, head_dtype=head_dtype or dtype, device=torch.device("cpu"), folder=folder)


def requests(n: int, temperature: float = 1.0, max_tokens: int = 24, stop: tuple[int, ...] = ()) -> list[Request]:
    sampling = Sampling(temperature, max_tokens, stop)
    return [
        Request(group, prompt, [sample_seed(0, group, sample) for sample in range(n)], sampling)
        for group, prompt in enumerate(PROMPTS)
    ]


def run(
    decoder: Decoder, wanted: list[Request], max_batch: int = 64, prefill_tokens: int = 64
) -> list[list[Completion]]:
    storage = Storage(decoder.arch, max_batch=max_batch, dtype=decoder.dtype, device=decoder.device)
    batch = Batch(decoder, storage, wanted, version=0, prefill_tokens=prefill_tokens)
    groups = []
    while not batch.done:
        batch.step()
        groups += batch.take()
    assert sorted(g.group for g in groups) == [r.group for r in wanted]
    return [g.completions for g in sorted(groups, key=lambda g: g.group)]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_equal_a_transformers_forward(name: str, make_model: Callable[..., Path]):
    folder = make_model(name.removesuffix("-bias").removesuffix("3-rope"), **FAMILIES[name])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if name in ("llama-bias", "qwen2"):  # fresh models have zero biases and norms of one: make them count
        generator = torch.Generator().manual_seed(1)
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
        reference.save_pretrained(folder)
    for temperature in (1.0, 0.7):
        for request, completions in zip(wanted := requests(3, temperature), run(load(folder), wanted), strict=True):
            for completion in completions:
                ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
                with torch.inference_mode():
                    logits = reference(ids).logits[0, len(request.prompt_ids) - 1 : -1]
                expected = torch.log_softmax(logits / temperature, -1)
                expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_equals_transformers_generate(tiny_model: Path):
    reference: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for request, (completion,) in zip(wanted := requests(1, 0.0), run(load(tiny_model), wanted), strict=True):
        ids = torch.tensor([list(request.prompt_ids)])
        out = reference.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert completion.token_ids == out[0, len(request.prompt_ids) :].tolist()
        assert completion.finish_reason == "length"


def test_refilled_slots_equal_one_sample_at_a_time(tiny_model: Path):
    """Stops at random places, so that rows move between slots; three slots for twenty samples."""
    decoder = load(tiny_model)
    wanted = requests(5, stop=tuple(range(100, 120)))
    together = run(decoder, wanted, max_batch=3, prefill_tokens=8)
    lengths = {len(c.token_ids) for completions in together for c in completions}
    assert len(lengths) > 3
    for request, completions in zip(wanted, together, strict=True):
        for seed, completion in zip(request.seeds, completions, strict=True):
            ((alone,),) = run(decoder, [Request(request.group, request.prompt_ids, [seed], request.sampling)], 1)
            assert alone.token_ids == completion.token_ids
            assert alone.finish_reason == completion.finish_reason
            torch.testing.assert_close(
                torch.tensor(alone.logprobs), torch.tensor(completion.logprobs), atol=1e-5, rtol=0
            )


def test_stop_tokens_end_a_sample_and_belong_to_it(tiny_model: Path):
    stops = tuple(range(100, 140))
    reasons = set()
    for completions in run(load(tiny_model), requests(8, stop=stops)):
        for c in completions:
            reasons.add(c.finish_reason)
            assert not set(c.token_ids[:-1]) & set(stops)
            assert (c.token_ids[-1] in stops) == (c.finish_reason == "stop")
            assert len(c.token_ids) == 24 or c.finish_reason == "stop"
            assert c.weight_spans == [(0, len(c.token_ids))]
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repetition_is_bit_identical(dtype: torch.dtype, tiny_model: Path):
    decoder = load(tiny_model, dtype, torch.float32)
    wanted = requests(6, stop=tuple(range(100, 120)))
    first = run(decoder, wanted, max_batch=5)
    assert run(decoder, wanted, max_batch=5) == first  # the second one starts on the first one's stale cache
    assert run(load(tiny_model, dtype, torch.float32), wanted, max_batch=5) == first


def test_seeds_and_samples_differ(tiny_model: Path):
    for completions in run(load(tiny_model), requests(6)):
        assert len({tuple(c.token_ids) for c in completions}) == 6


def test_refresh_recomputes_what_is_under_way(tiny_model: Path, make_model: Callable[..., Path]):
    """After a change of weights, the log-probabilities of further tokens are those of the new weights from scratch."""
    decoder, other = load(tiny_model), make_model(seed=5)
    reference = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    storage = Storage(decoder.arch, max_batch=5, dtype=torch.float32, device=torch.device("cpu"))
    batch = Batch(decoder, storage, wanted := requests(4), version=0, prefill_tokens=16)
    for _ in range(10):
        batch.step()
    decoder.parameters.read_folder(other)
    decoder.refresh()
    batch.refresh(1)
    while not batch.done:
        batch.step()
    spans = set()
    for group in batch.take():
        for c in group.completions:
            spans.add(len(c.weight_spans))
            before = c.weight_spans[0][1] if c.weight_spans[0][0] == 0 else 0
            prompt = wanted[group.group].prompt_ids
            ids = torch.tensor([[*prompt, *c.token_ids]])
            with torch.inference_mode():
                expected = torch.log_softmax(reference(ids).logits[0, len(prompt) - 1 : -1], -1)
            expected = expected.gather(1, torch.tensor(c.token_ids)[:, None])[before:, 0]
            torch.testing.assert_close(torch.tensor(c.logprobs[before:]), expected, atol=1e-4, rtol=0)
    assert spans == {1, 2}


def test_abort_gives_every_group_back(tiny_model: Path):
    decoder = load(tiny_model)
    storage = Storage(decoder.arch, max_batch=5, dtype=torch.float32, device=torch.device("cpu"))
    batch = Batch(decoder, storage, requests(4), version=0, prefill_tokens=16)
    for _ in range(3):
        batch.step()
    batch.abort()
    groups = batch.take()
    assert batch.done and len(groups) == 4
    assert sorted(len(c.token_ids) for g in groups for c in g.completions) == [0] * 11 + [3] * 5
    assert {c.finish_reason for g in groups for c in g.completions} == {"abort"}


def test_other_architectures_are_refused_with_the_families(tmp_path: Path, make_model: Callable[..., Path]):
    with pytest.raises(UnsupportedModel, match="no Hugging Face model folder"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        read_architecture(tmp_path)
    (make_model(seed=9) / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("max_batch", [3, 16, 64])
def test_samples_that_say_the_same_are_computed_once_and_part_where_they_differ(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, max_batch: int
):
    """Against every sample on its own; at a low temperature many begin alike."""
    decoder = load(make_model("llama"))
    wanted = requests(6, temperature=0.15, max_tokens=12)
    alone = []
    for request in wanted:
        singles = [Request(request.group, request.prompt_ids, [seed], request.sampling) for seed in request.seeds]
        alone.append([run_one(decoder, single) for single in singles])
    rows: list[int] = []
    decode = decoder.decode

    def counted(tokens, *rest):
        rows.append(len(tokens))
        return decode(tokens, *rest)

    monkeypatch.setattr(decoder, "decode", counted)
    together = run(decoder, wanted, max_batch=max_batch)
    for samples, singles in zip(together, alone, strict=True):
        assert [s.token_ids for s in samples] == [s.token_ids for s in singles]
        assert [s.sample for s in samples] == list(range(6))
        for sample, single in zip(samples, singles, strict=True):
            torch.testing.assert_close(sample.logprobs, single.logprobs, rtol=1e-4, atol=1e-4)
    tokens = sum(len(s.token_ids) - 1 for samples in together for s in samples)
    different = {tuple(s.token_ids[:n]) for samples in together for s in samples for n in range(1, 12)}
    assert len(different) < tokens and sum(rows) < tokens
    if max_batch == 64:  # every group is one batch: nothing is computed twice
        prefixes = {(g, tuple(s.token_ids[:n])) for g, ss in enumerate(together) for s in ss for n in range(1, 12)}
        assert sum(rows) == len(prefixes)


def run_one(decoder: Decoder, request: Request) -> Completion:
    storage = Storage(decoder.arch, max_batch=1, dtype=decoder.dtype, device=decoder.device)
    batch = Batch(decoder, storage, [request], version=0, prefill_tokens=64)
    while not batch.done:
        batch.step()
    (group,) = batch.take()
    return group.completions[0]
