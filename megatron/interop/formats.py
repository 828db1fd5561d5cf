"""The checkpoint formats of Hugging Face and Megatron-LM for `--load`."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.formats import Format
from megatron.checkpoint.storage import TRACKER, iterations
from megatron.errors import InputError
from megatron.interop.huggingface.read import is_huggingface, open_huggingface
from megatron.interop.nvidia.read import is_megatron


def _is_model(path: Path) -> bool:
    """True for a Hugging Face model in a folder that no run has saved to since."""
    return is_huggingface(path) and not (path / TRACKER).exists() and not iterations(path)


def _hub_hint(path: Path) -> str:
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
    return "; models on the Hugging Face hub are not looked up: download it first" if is_name else ""


def _refuse(path: Path) -> Checkpoint:
    raise InputError(
        f"--load: {path} holds a Megatron-LM checkpoint; convert it with megatron convert --from megatron "
        "--to native"
    )


EXTERNAL_FORMATS = {
    format.name: format
    for format in (
        Format("Megatron-LM", is_megatron, _refuse),
        Format("Hugging Face", _is_model, open_huggingface, _hub_hint),
    )
}
