"""The tokenizer of a token file, kept beside it: PREFIX.tokenizer/ with copies of its files, and record.json.

The copies let training use the data without flags for the tokenizer, also after the data has been moved. Token files
of other programs have no record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.files import read_file
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

FOLDER = ".tokenizer"
RECORD = "record.json"
PATHS = ("vocab_file", "merge_file", "tokenizer_model")
# Settings that decide the ids beside type and files.
SETTINGS = ("tiktoken_pattern", "tiktoken_num_special_tokens")
# These files decide no ids but that of the end of a document, which is compared by itself.
ROLES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """A tokenizer as it is recorded.

    Attributes:
        flags: fields of `TokenizerConfig`, with names of files in place of paths.
        type: `Tokenizer.name`.
        vocab_size: number of ids.
        eod: id of the end of a document; None without one.
        files: SHA-256 of the files by name.
    """

    flags: Mapping[str, Any]
    type: str
    vocab_size: int
    eod: int | None
    files: Mapping[str, str]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for tokenizers that give the same ids."""
        contents = sorted(digest for name, digest in self.files.items() if name not in ROLES)
        # BERT's may leave out [BOS] and [EOS], the last ids, which text never gives.
        vocab_size = None if self.type.startswith("Bert") else self.vocab_size
        settings = [self.flags.get(name) for name in SETTINGS] if self.type == "TikTokenizer" else []
        return self.type, vocab_size, self.eod, *contents, *settings

    @property
    def digest(self) -> str:
        """Digest of `key`."""
        return hashlib.sha256(json.dumps(self.key).encode()).hexdigest()

    def __str__(self) -> str:
        names = "".join(f", {name} {digest[:8]}" for name, digest in self.files.items() if name not in ROLES)
        return f"{self.type} ({self.vocab_size:,} ids{names})"

    def config(self, prefix: str) -> TokenizerConfig:
        """The flags of this tokenizer, with the paths of the copies at a prefix."""
        flags = dict(self.flags)
        for name in PATHS:
            if name in flags:
                flags[name] = os.path.join(prefix + FOLDER, flags[name])
        return TokenizerConfig(**flags)


def describe_tokenizer(tokenizer: Tokenizer, config: TokenizerConfig) -> TokenizerRecord:
    """Make the record of a tokenizer built from `config`."""
    files = {file.name: hashlib.sha256(read_file(file)).hexdigest() for file in tokenizer.files}
    if len(files) < len(tokenizer.files) or RECORD in files:
        raise InputError(f"{tokenizer}: two of its files have one name, or one is {RECORD}; rename them")
    flags = {}
    for field in dataclasses.fields(TokenizerConfig):
        value = getattr(config, field.name)
        if value == field.default or field.name == "make_vocab_size_divisible_by":
            continue
        if field.name in PATHS:
            if Path(value).is_dir():
                value = tokenizer.files[0].name
            elif Path(value).name not in files:
                continue  # of another type of tokenizer
            value = Path(value).name
        flags[field.name] = value
    return TokenizerRecord(
        flags=flags,
        type=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.special_ids.get("eod"),
        files=files,
    )


def write_tokenizer(prefix: str, record: TokenizerRecord, source: Mapping[str, Path]) -> Callable[[], None]:
    """Write the record of the token file at `prefix` under a temporary name.

    Args:
        source: the tokenizer's files by name.

    Returns:
        A function that renames it, in place of an older one. `discard_tokenizer` removes one that is not renamed.

    Raises:
        OSError: it cannot be written.
    """
    discard_tokenizer(prefix)
    temporary = _temporary(prefix)
    temporary.mkdir()
    for name, path in source.items():
        write_synced(temporary / name, read_file(path))
    write_synced(temporary / RECORD, as_json({"format": 1, **dataclasses.asdict(record)}))

    def rename() -> None:
        remove_tokenizer(prefix)
        temporary.rename(prefix + FOLDER)

    return rename


def discard_tokenizer(prefix: str) -> None:
    """Remove a record that `write_tokenizer` wrote and that was not renamed, if there is one."""
    shutil.rmtree(_temporary(prefix), ignore_errors=True)


def _temporary(prefix: str) -> Path:
    return Path(f"{prefix}{FOLDER}.tmp")


def as_json(record: Mapping[str, Any]) -> bytes:
    """The content of a record's file."""
    return (json.dumps(record, indent=1) + "\n").encode()


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that a power failure does not empty."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_tokenizer(prefix: str) -> None:
    """Remove the record of a token file, if it has one."""
    if os.path.isdir(prefix + FOLDER):
        shutil.rmtree(prefix + FOLDER)


def read_tokenizer(prefix: str) -> TokenizerRecord | None:
    """Read the record of the token file at `prefix`; None if it has none.

    Raises:
        InputError: the record is damaged, or its files are not those that were recorded.
    """
    folder = Path(prefix + FOLDER)
    if not folder.is_dir():
        return None
    path = folder / RECORD
    wrong = InputError(
        f"{path}: is not the record of a tokenizer; copy the folder again, or remove it and give the tokenizer's flags"
    )
    try:
        found = json.loads(read_file(path))
        if not isinstance(found, dict) or found.pop("format", None) != 1:
            raise wrong
        record = TokenizerRecord(**found)
        types = {"flags": dict, "type": str, "vocab_size": int, "eod": int | None, "files": dict}
        if not all(isinstance(getattr(record, name), kind) for name, kind in types.items()):
            raise wrong
        names = [*record.files, *(record.flags[name] for name in PATHS if name in record.flags)]
        if any(Path(name).name != name or name in (".", "..") for name in names):
            raise wrong
        digests = {name: hashlib.sha256(read_file(folder / name)).hexdigest() for name in record.files}
        record.config(prefix)
    except OSError as error:
        raise InputError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise wrong from None
    for name, digest in digests.items():
        if digest != record.files[name]:
            raise InputError(
                f"{folder / name}: was changed after the data was made; copy the folder again, or remove it and give "
                "the tokenizer's flags"
            )
    return record
