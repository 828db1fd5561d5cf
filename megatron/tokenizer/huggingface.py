"""Hugging Face tokenizer, from a tokenizer.json on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from megatron.errors import InputError
from megatron.tokenizer.base import Tokenizer, read_json, read_text
from megatron.tokenizer.config import TokenizerConfig

# Key of tokenizer_config.json that names the token of each role.
CONFIG_KEYS = {
    "eod": "eos_token",
    "eos": "eos_token",
    "bos": "bos_token",
    "pad": "pad_token",
    "cls": "cls_token",
    "sep": "sep_token",
    "mask": "mask_token",
}


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, given as the file or its directory.

    The tokenizer_config.json next to it names the special tokens. Documents end with its eos_token. Special tokens
    written out in text become their ids, as in the transformers library.
    """

    def __init__(self, path: str) -> None:
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InputError(
                f"--tokenizer-model: {file} does not exist; give a tokenizer.json or the directory holding one "
                "(model names on the Hugging Face hub are not looked up)"
            )
        text = read_text(str(file))
        try:
            self._tokenizer = HFTokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise InputError(f"{file}: is not a tokenizer.json: {error}") from None
        # A file saved with a model's maximum length would truncate documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = file.with_name("tokenizer_config.json")
        has_config = file.name == "tokenizer.json" and config.is_file()
        names = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
        beside = map(file.with_name, names) if has_config else ()
        super().__init__(
            "HuggingFaceTokenizer",
            files=[file, *(path for path in beside if path.is_file())],
            vocab_size=max(self._tokenizer.get_vocab().values(), default=-1) + 1,
            special_ids=self._special_ids(config) if has_config else {},
        )

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> HuggingFaceTokenizer:
        return cls(*config.require("tokenizer_model"))

    def _special_ids(self, config: Path) -> dict[str, int]:
        settings = read_json(str(config))
        if not isinstance(settings, dict):
            raise InputError(f"{config}: is not a JSON object")
        special_ids = {}
        for role, key in CONFIG_KEYS.items():
            token = settings.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is None:
                continue
            i = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
            if i is None:
                raise InputError(f"{config}: {key} is {token!r}, which the tokenizer.json next to it lacks")
            special_ids[role] = i
        return special_ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:
            # The library's bindings export no class for it.
            if type(error).__name__ != "PanicException":
                raise
            # Mostly a pattern such as (a+)+$, whose search the library ends after ten million steps.
            raise InputError(
                f"{self.files[0]}: fails to tokenize a text ({' '.join(str(error).split())})"
            ) from None

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
