"""Find the tokenizer of a Hugging Face model's folder."""

from __future__ import annotations

from pathlib import Path

from megatron.interop.huggingface.settings import Settings
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.detect import bert_tokenizer, check_added_tokens, tokenizer_of_folder


def find_tokenizer(folder: Path, settings: Settings) -> TokenizerConfig:
    """Find the tokenizer in a model's folder; without a type if there is none.

    Raises:
        InputError: the folder adds tokens that the tokenizer lacks.
    """
    vocab = folder / "vocab.txt"
    if settings.family.model_type != "megatron-bert" or not vocab.is_file():
        return tokenizer_of_folder(folder)
    # Imported here because it imports the tokenizers library.
    from megatron.tokenizer.bert import ADDED, read_vocab

    lines = len(read_vocab(str(vocab)))
    # Models of other origin than Megatron-LM have no rows for [BOS] and [EOS], which are added to the lines.
    config = bert_tokenizer(vocab, lines if settings.rows < lines + len(ADDED) else None)
    check_added_tokens(folder, config)
    return config
