"""Flags of settings that do not come from the command line."""

from __future__ import annotations

import dataclasses

from megatron.flags import flag
from megatron.training.config import PluginConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingsConfig(PluginConfig):
    """Settings from the checkpoint to load."""

    use_checkpoint_args: bool = flag(
        False,
        "take the model's architecture from the checkpoint, in place of the command line's (with --finetune the given "
        "flags of RoPE win); also take the model's other flags, --seq-length and the tokenizer, unless the command "
        "line gives them",
    )
