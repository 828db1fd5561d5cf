"""Detect the tokenizer of a folder or file (--tokenizer)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import read_json
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import FOLDER, RECORD, read_tokenizer

FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.json")


def detect_tokenizer(path: str) -> TokenizerConfig:
    """Detect the tokenizer of a folder or file.

    Raises:
        InputError: there is no tokenizer, or the folder adds tokens that it lacks.
    """
    if not Path(path).exists():
        raise InputError(
            f"--tokenizer: {path} does not exist; give a folder or file (names on the Hugging Face hub are not "
            "looked up)"
        )
    config = _detect_in_folder(Path(path)) if Path(path).is_dir() else _detect_file(Path(path))
    if config.tokenizer_type is None:
        raise InputError(
            f"--tokenizer: {path} is no tokenizer; give a folder with tokenizer.json, with vocab.json and merges.txt, "
            "with BERT's vocab.txt, or with a SentencePiece .model, or one of the files (others: --tokenizer-type)"
        )
    return config


def _detect_in_folder(folder: Path) -> TokenizerConfig:
    if folder.name.endswith(FOLDER) and (folder / RECORD).is_file():
        prefix = str(folder)[: -len(FOLDER)]
        record = read_tokenizer(prefix)
        return record.config(prefix) if record else TokenizerConfig()
    fast, vocab = folder / "tokenizer.json", folder / "vocab.txt"
    if vocab.is_file() and (not fast.is_file() or _model_type(fast) == "WordPiece"):
        return bert_tokenizer(vocab)
    return tokenizer_of_folder(folder)


def _detect_file(file: Path) -> TokenizerConfig:
    path = str(file.absolute())
    if file.suffix == ".model":
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path)
    if file.name == "vocab.txt":
        return bert_tokenizer(file)
    if file.suffix == ".tiktoken" or (file.suffix == ".json" and isinstance(read_json(path), list)):
        return TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=path)
    if file.suffix == ".json" and _model_type(file) is not None:
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path)
    if file.name in FILES:
        return tokenizer_of_folder(file.parent)
    return TokenizerConfig()


def _model_type(file: Path) -> str | None:
    """The type of the model in a tokenizer.json; None if the file is something else."""
    content = read_json(str(file))
    model = content.get("model") if isinstance(content, dict) else None
    return str(model.get("type", "BPE")) if isinstance(model, dict) else None


def bert_tokenizer(vocab: Path, vocab_size: int | None = None) -> TokenizerConfig:
    """The tokenizer of BERT's vocab.txt; the tokenizer_config.json next to it says if it distinguishes case."""
    file = vocab.parent / "tokenizer_config.json"
    settings = read_json(str(file)) if file.is_file() else {}
    lowercase = settings.get("do_lower_case", True) if isinstance(settings, dict) else True
    return TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase" if lowercase else "BertWordPieceCase",
        vocab_file=str(vocab.absolute()),
        vocab_size=vocab_size,
    )


def tokenizer_of_folder(folder: Path) -> TokenizerConfig:
    """Find the tokenizer in a folder, other than BERT's; without a type if there is none.

    Like transformers, prefer tokenizer.json to the files that it was made from, unless vocab.json and merges.txt are
    the same tokenizer, GPT-2's.

    Raises:
        InputError: the folder adds tokens that the tokenizer lacks.
    """
    config = _find(folder)
    if config.tokenizer_type is not None:
        check_added_tokens(folder, config)
    return config


def check_added_tokens(folder: Path, config: TokenizerConfig) -> None:
    """Raise `InputError` if the folder adds tokens that the tokenizer of `config` lacks."""
    added = _added_tokens(folder)
    size = build_tokenizer(config).vocab_size if added else 0
    lost = sorted(text for text, i in added.items() if i >= size)
    if lost:
        raise InputError(
            f"{folder}: adds {len(lost)} tokens, such as {lost[0]!r}, that its {config.tokenizer_type} "
            "lacks; save the tokenizer with transformers as a tokenizer.json: "
            f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
        )


def _find(folder: Path) -> TokenizerConfig:
    path = {name: str(folder.absolute() / name) for name in FILES if (folder / name).is_file()}
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
    vocab, model_vocab = ours["model"]["vocab"], theirs["model"].get("vocab")
    pre = theirs.get("pre_tokenizer") or {}
    return (
        theirs["model"].get("type", "BPE") == "BPE"
        # The end-of-document token may be an added token alone.
        and isinstance(model_vocab, dict)
        and model_vocab | special == vocab
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
