"""Files of prompts, and the empty prompt."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.files import read_file
from megatron.tokenizer import Tokenizer


def document_start(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that stand for an empty prompt: the end of the document before.

    Raises:
        InputError: the tokenizer has no end-of-document token.
    """
    if "eod" not in tokenizer.special_ids:
        raise InputError(f"is empty, and {tokenizer} has no end-of-document token to begin with")
    return [tokenizer.special_ids["eod"]]


def read_prompts(flag: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each prompt of the file that a flag names.

    A file has a prompt per line; a .jsonl file has one under "prompt" or "text" of each line. Blank lines are skipped.

    Raises:
        InputError: the file is unreadable or empty, or a line is malformed.
    """
    try:
        lines = read_file(path).removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be read ({error.strerror})") from None
    if not any(line.strip() for line in lines):
        raise InputError(f"{flag}: {path} is empty")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        try:
            text = line.decode("utf-8")
            yield location, _prompt_of(json.loads(text)) if path.suffix == ".jsonl" else text
        except UnicodeDecodeError:
            raise InputError(f"{location}: is not UTF-8 text") from None
        except (ValueError, RecursionError):
            raise InputError(
                f"{location}: is not a JSON object with a string under 'prompt' or 'text'"
            ) from None


def _prompt_of(value: Any) -> str:
    text = value.get("prompt", value.get("text")) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError
    return text
