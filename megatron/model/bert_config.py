"""Checks of BERT's configuration, which need no torch."""

from __future__ import annotations

from megatron.errors import InputError
from megatron.model.config import ModelConfig


def check_bert(config: ModelConfig) -> None:
    """Check that BERT has the parts that the flags of the model ask for.

    Raises:
        InputError: a flag is for GPT only.
    """
    if config.num_experts is not None:
        raise InputError("--num-experts: mixtures of experts are for GPT; BERT's layers are dense")
