"""Models whose files are not ours: their tensors under our names, each read from where it lies when it is wanted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.pieces import Index, check_shape
from megatron.model.bert import BertModel
from megatron.model.config import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.parallel.slices import GlobalSlice
from megatron.tokenizer.config import TokenizerConfig


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of the whole model, without rows that pad the vocabulary.

    Attributes:
        dtype: torch.float32 or torch.bfloat16, in which our own files would hold it without loss.
        read: reads and arranges it; what it gives has this shape, and any dtype that `dtype` holds without loss.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Assembled:
    """As `Pieces`, the tensors of a checkpoint, to read what is wanted of them: here by their sources.

    One tensor is in memory at a time, whole, however small the part that is wanted of it.

    Raises, as every method:
        InputError: a file is missing or damaged.
    """

    folder: Path
    sources: dict[str, Source]

    @functools.cached_property
    def index(self) -> Index:
        """Name of a tensor to its shape and dtype."""
        return {name: {"shape": s.shape, "dtype": str(s.dtype)[6:]} for name, s in self.sources.items()}

    def read(self, name: str, place: GlobalSlice) -> Tensor:
        """The part `place` of a tensor, in fp32; rows that pad the vocabulary are zero."""
        check_shape(self.folder, self.index, name, place)
        values = torch.zeros(place.local_shape[0], place.row)
        source = self.sources[name].read()
        matrix = source.reshape(len(source), -1)[: place.real]
        for local, whole in place.blocks():
            part = matrix[slice(*whole.rows), slice(*whole.columns)]
            values[local.rows[0] : local.rows[0] + len(part), slice(*local.columns)] = part
        return values.view(place.local_shape)


def model_without_memory(task: str, config: ModelConfig, vocab_size: int) -> nn.Module:
    """The whole model on the meta device, which tells the names, shapes and places of its parameters. It has no rows
    that pad the vocabulary."""
    sizes = {"vocab_size": vocab_size, "padded_vocab_size": vocab_size}
    with torch.device("meta"):
        if task == "GPT":
            return GPTModel(config, **sizes)
        return BertModel(config, binary_head=task == "BERT", **sizes)


def weights_state(
    task: str, model: ModelConfig, tokenizer: TokenizerConfig, *, vocab_size: int, bf16: bool
) -> dict[str, Any]:
    """The state of a checkpoint that holds a model's weights alone, as at iteration 0: what is known of its
    optimizer, schedule and progress is put in their places.

    Args:
        task: "GPT", "BERT" or "BERT --bert-no-binary-head".
        tokenizer: of which files are named by their paths; without a type if there is none.
        vocab_size: ids of the tokenizer, which is as many rows as the tables of words have.
    """
    multiple = tokenizer.make_vocab_size_divisible_by
    return {
        "task": task,
        "iteration": 0,
        "consumed_samples": 0,
        "train_samples": 0,
        "evaluation_due": False,
        "bad_steps": 0,
        "history": [],
        "spike_window": None,
        "vocab_size": vocab_size,
        "padded_vocab_size": -(-vocab_size // multiple) * multiple,
        "optimizer_steps": None,
        "schedule": {},
        "config": {
            "model": dataclasses.asdict(model),
            "data": {"seq_length": model.max_position_embeddings},
            "tokenizer": dataclasses.asdict(tokenizer),
            "training": {"bf16": bf16},
        },
    }


def shown(names: Collection[str]) -> str:
    """Names of tensors, the first ten of them and their number."""
    names = sorted(names)
    return f"{len(names)} tensor(s): {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
