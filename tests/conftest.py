"""Fixtures that several rooms share, made once for each session: tiny random models in Hugging Face folders, S3."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: what comes last, when one of two processes has nothing more to do, is short."""
    items.sort(key=lambda item: not item.get_closest_marker("slow"))


SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MakeModel = Callable[..., Path]


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: every byte is one token, so any text encodes and digits stay single."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make_model(family="llama", seed=0, **config) -> Path``: a random float32 model with tied embeddings.

    Hidden size 64, 2 layers, 4 query heads over 2 key heads, vocabulary 259, context 512, standard deviation 0.2 so
    that its distributions are far from uniform. ``config`` overrides fields of the family's configuration.
    """

    def make(family: str = "llama", seed: int = 0, **config: object) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = tmp_path_factory.mktemp(family)
        fields: dict[str, object] = {
            "vocab_size": 259,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(fields | config)))
        model.to(torch.float32).save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: MakeModel) -> Path:
    """A tiny random Llama with a byte tokenizer and a ChatML template. Read only: tests copy it to change it."""
    return make_model()


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket of an S3 server process; the environment names the server and the credentials."""
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        port = next(found[1] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            patch.setenv("AWS_CONFIG_FILE", os.devnull)
            import s3fs

            s3fs.S3FileSystem().mkdir("headrace-test")
            yield "s3://headrace-test"
    finally:
        server.kill()
        server.wait(10)
