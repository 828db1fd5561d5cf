"""Checkpoints in another program's format: their tensors under native names, read on demand."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import megatron.variants.registry  # noqa: F401 (models of other programs need it)
from megatron.checkpoint.pieces import Index, check_shape
from megatron.model.bert import BertModel
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.parallel.slices import Block, GlobalSlice, Range
from megatron.tokenizer.config import TokenizerConfig


@dataclasses.dataclass(frozen=True)
class ExternalTensor:
    """A tensor of the whole model, without rows that pad the vocabulary.

    Attributes:
        dtype: torch.float32 or torch.bfloat16, which holds the values without loss.
        parts: read and rearrange equal numbers of rows, one part after the other, such as those of an expert; in
            `dtype` or a narrower dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Callable[[], Tensor], ...]


@dataclasses.dataclass(frozen=True)
class ExternalTensors:
    """A `TensorSource` over another program's files.

    Reading a shard reads the parts with its rows, one at a time. `index` has the number of parts of each tensor.
    """

    folder: Path
    tensors: dict[str, ExternalTensor]

    @functools.cached_property
    def index(self) -> Index:
        return {
            name: {"shape": s.shape, "dtype": str(s.dtype)[6:], "parts": len(s.parts)}
            for name, s in self.tensors.items()
        }

    def read(self, name: str, spec: GlobalSlice) -> Tensor:
        check_shape(self.folder, self.index, name, spec)
        values = torch.zeros(spec.local_shape[0], spec.row)
        tensor = self.tensors[name]
        columns = (0, math.prod(tensor.shape[1:]))
        valid = tensor.shape[0] if spec.num_valid_rows is None else spec.num_valid_rows
        for rows, read in zip(rows_of_parts(tensor.shape[0], len(tensor.parts)), tensor.parts, strict=True):
            part = Block((rows[0], min(rows[1], valid)), columns)
            needed = [
                (both, local, whole) for local, whole in spec.blocks() if (both := part.intersect(whole))
            ]
            if not needed:
                continue
            matrix = read().reshape(rows[1] - rows[0], -1)
            for both, local, whole in needed:
                source = both.translated(Block(rows, columns), Block((0, 0), (0, 0)))
                values[both.translated(whole, local).index] = matrix[source.index]
        return values.view(spec.local_shape)

    def read_into(self, target: Tensor, name: str, spec: GlobalSlice, begin: int) -> None:
        target.copy_(self.read(name, spec).view(-1)[begin : begin + target.numel()])


def rows_of_parts(rows: int, parts: int) -> list[Range]:
    """The rows of each of equal parts of a tensor."""
    return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


def meta_model(task: str, config: ModelConfig, vocab_size: int) -> nn.Module:
    """Build the whole model on the meta device, without rows that pad the vocabulary.

    It gives the names, shapes and shard specs of the parameters without allocating memory.
    """
    context = ModelContext(vocab_size=vocab_size, padded_vocab_size=vocab_size)
    with torch.device("meta"):
        if task == "GPT":
            return GPTModel(config, context)
        return BertModel(config, context, binary_head=task == "BERT")


def weights_only_state(
    task: str, model: ModelConfig, tokenizer: TokenizerConfig, *, vocab_size: int, bf16: bool
) -> dict[str, Any]:
    """The content of state.json for a checkpoint that holds only weights, at iteration 0.

    The caller fills in what it knows of optimizer, schedule and progress.

    Args:
        task: "GPT", "BERT" or "BERT --bert-no-binary-head".
        tokenizer: with the paths of its files; without a type if the checkpoint has no tokenizer.
        vocab_size: number of ids of the tokenizer, and of rows of the word embeddings.
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


def list_names(names: Collection[str]) -> str:
    """List names of tensors for a message: their number and the first ten."""
    names = sorted(names)
    return f"{len(names)} tensor(s): {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
