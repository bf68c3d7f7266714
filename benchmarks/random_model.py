"""A random Qwen2 that behaves like a trained model: ``python -m benchmarks.random_model OUT --size 1.57B``.

For machines that have no real model. With transformers' own initialisation all distributions are nearly uniform, and
with larger weights everywhere many layers are chaotic: rounding in bfloat16 alone gives another distribution. Here
bfloat16 against float32 of one implementation differs by a KL of 0.001, and tokens far back in the context count.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "0.45B": (896, 24, 14, 2, 4864),
    "1.57B": (1536, 32, 12, 2, 8960),
    "8B": (4096, 32, 32, 8, 14336),
}
"""name → hidden size, layers, heads, key-value heads, MLP size."""
SCALES = {"lm_head": 2.5, "q_proj": 1.0, "k_proj": 1.0, "v_proj": 1.2, "o_proj": 1.0}
"""Standard deviation of a projection's weights, times the square root of the hidden size."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def make_model(out: Path, size: str, tokenizer: Path) -> None:
    """Writes the folder, in bfloat16, with the files of a tokenizer of at most 49,152 tokens. Uses a GPU if it can."""
    hidden, layers, heads, kv_heads, mlp = SIZES[size]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        use_sliding_window=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        model = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.02)
            for part, scale in SCALES.items():
                if f"{part}.weight" in name:
                    parameter.normal_(0, scale / hidden**0.5)
    model.to(torch.bfloat16).save_pretrained(out)  # pyright: ignore[reportArgumentType]
    for file in TOKENIZER:
        if (tokenizer / file).is_file():
            shutil.copyfile(tokenizer / file, out / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1.57B")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer's files")
    given = parser.parse_args()
    make_model(given.out, given.size, given.tokenizer)


if __name__ == "__main__":
    main()
