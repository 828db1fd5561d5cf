"""The tokenizer that is saved with a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.checkpoint.checkpoint import Checkpoint, saved_config
from megatron.tokenizer.config import TokenizerConfig


def saved_tokenizer(checkpoint: Checkpoint) -> TokenizerConfig:
    """The tokenizer's configuration in the run that saved a checkpoint, with the paths of the files saved with it."""
    saved = saved_config(checkpoint, "tokenizer", TokenizerConfig)
    if checkpoint.manifest is None:  # another program's files, given by their paths
        return saved
    folder = checkpoint.folder / "tokenizer"
    files: dict[str, Any] = {}
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(saved, name)
        if path is not None:
            file = folder / Path(path).name
            # A tokenizer given as a folder was saved as the files in that folder.
            files[name] = str(file if file.exists() else folder)
    return dataclasses.replace(saved, **files)
