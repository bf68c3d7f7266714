"""From chat messages to token ids and back, with the tokenizer of the model folder."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from headrace.engines.rollout.errors import NoChatTemplate, UnsupportedModel


class Renderer:
    """Renders prompts and decodes responses."""

    def __init__(self, folder: Path) -> None:
        """Raises UnsupportedModel for a folder without a tokenizer, NoChatTemplate for one that cannot render chats."""
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{folder} has no tokenizer that transformers can load: {error}") from error
        if not self._tokenizer.chat_template:
            raise NoChatTemplate(
                f"the tokenizer in {folder} has no chat template, so chat prompts cannot be rendered: choose an "
                f"instruct model, or put the template of its family into {folder / 'chat_template.jinja'}"
            )
        self.stop_token_ids = self._stops(folder)

    def _stops(self, folder: Path) -> tuple[int, ...]:
        """The tokenizer's end token and those of generation_config.json, ascending."""
        stops: list[Any] = [self._tokenizer.eos_token_id]
        if (folder / "generation_config.json").is_file():
            configured: Any = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
            stops += configured if isinstance(configured, list) else [configured]
        known = {token for token in stops if token is not None}
        if not known:
            raise UnsupportedModel(f"the tokenizer in {folder} names no end token (eos_token): no sample would stop")
        return tuple(sorted(known))

    def render(self, messages: str) -> tuple[str, list[int]]:
        """Text and token ids of a prompt that asks for the assistant's answer. messages: JSON, see ``PROMPTS``."""
        text = self._tokenizer.apply_chat_template(json.loads(messages), add_generation_prompt=True, tokenize=False)
        assert isinstance(text, str)
        return text, self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: list[int]) -> str:
        """The text of a response, without special tokens."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text
