"""Find the tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.interop.huggingface.settings import Settings
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import read_json
from megatron.tokenizer.config import TokenizerConfig

FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.json")


def find_tokenizer(folder: Path, settings: Settings) -> TokenizerConfig:
    """Find the tokenizer in a folder; without a type if there is none.

    Like transformers, prefer tokenizer.json to the files that it was made from, unless vocab.json and merges.txt are
    the same tokenizer, GPT-2's.

    Raises:
        InputError: the folder adds tokens that the tokenizer lacks.
    """
    config = _find(folder, settings)
    if config.tokenizer_type is not None:
        added = _added_tokens(folder)
        size = build_tokenizer(config).vocab_size
        lost = sorted(text for text, i in added.items() if i >= size)
        if lost:
            raise InputError(
                f"{folder}: adds {len(lost)} tokens, such as {lost[0]!r}, that its {config.tokenizer_type} "
                "lacks; save the tokenizer with transformers as a tokenizer.json: "
                f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
            )
    return config


def _find(folder: Path, settings: Settings) -> TokenizerConfig:
    path = {name: str(folder.absolute() / name) for name in FILES if (folder / name).is_file()}
    if settings.family.model_type == "megatron-bert" and "vocab.txt" in path:
        return _bert(folder, path["vocab.txt"], settings)
    fast = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path.get("tokenizer.json"))
    if {"vocab.json", "merges.txt"} <= path.keys():
        gpt2 = TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=path["vocab.json"], merge_file=path["merges.txt"]
        )
        if "tokenizer.json" not in path or _is_gpt2(Path(path["tokenizer.json"]), gpt2):
            return gpt2
    if "tokenizer.json" in path:
        return fast
    models = sorted(folder.absolute().glob("*.model"))
    if models:
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(models[0]))
    return TokenizerConfig()


def _bert(folder: Path, vocab: str, settings: Settings) -> TokenizerConfig:
    # Imported here because it imports the tokenizers library.
    from megatron.tokenizer.bert import ADDED, read_vocab

    file = folder / "tokenizer_config.json"
    lowercase = (read_json(str(file)) if file.is_file() else {}).get("do_lower_case", True)
    lines = len(read_vocab(vocab))
    return TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase" if lowercase else "BertWordPieceCase",
        vocab_file=vocab,
        # Models of other origin than Megatron-LM have no rows for [BOS] and [EOS], which are added to the lines.
        vocab_size=lines if settings.rows < lines + len(ADDED) else None,
    )


def _is_gpt2(file: Path, config: TokenizerConfig) -> bool:
    """True if a tokenizer.json is GPT-2's tokenizer with the vocabulary and merges of `config`, and no more tokens."""
    # Imported here because it imports the tokenizers library.
    from megatron.tokenizer.gpt2 import GPT2BPETokenizer

    ours, theirs = json.loads(GPT2BPETokenizer.from_config(config).to_json()), read_json(str(file))
    if not isinstance(theirs, dict) or not isinstance(theirs.get("model"), dict):
        return False
    try:
        same_merges = [_merge(pair) for pair in theirs["model"]["merges"]] == [
            _merge(pair) for pair in ours["model"]["merges"]
        ]
        special = {token["content"]: token["id"] for token in theirs.get("added_tokens") or ()}
    except (KeyError, TypeError):
        return False
    vocab = ours["model"]["vocab"]
    pre = theirs.get("pre_tokenizer") or {}
    return (
        theirs["model"].get("type", "BPE") == "BPE"
        and theirs["model"].get("vocab") == vocab
        and same_merges
        and not any(
            theirs["model"].get(key) for key in ("dropout", "unk_token", "byte_fallback", "ignore_merges")
        )
        and not any(
            theirs["model"].get(key)
            for key in ("continuing_subword_prefix", "end_of_word_suffix", "fuse_unk")
        )
        and theirs.get("normalizer") is None
        and (pre.get("type"), pre.get("add_prefix_space"), pre.get("use_regex", True))
        == ("ByteLevel", False, True)
        and all(vocab.get(text) == i for text, i in special.items())
        # GPT2BPETokenizer takes special tokens in text as ordinary text; a file with more of them means them.
        and len(special) <= 1
    )


def _merge(pair: Any) -> tuple[str, ...]:
    """A merge, which older files have as one string."""
    return tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair)


def _added_tokens(folder: Path) -> dict[str, int]:
    """Tokens and ids in added_tokens.json and in tokenizer_config.json."""
    added: dict[str, int] = {}
    for name in ("added_tokens.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        content = read_json(str(folder / name))
        if not isinstance(content, dict):
            raise InputError(f"{folder / name}: is not a JSON object")
        try:
            if name == "added_tokens.json":
                added |= {text: int(i) for text, i in content.items()}
            else:
                decoder = content.get("added_tokens_decoder") or {}
                added |= {token["content"]: int(i) for i, token in decoder.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{folder / name}: its added tokens are not pairs of text and id") from None
    return added
