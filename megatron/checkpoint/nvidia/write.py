"""Writes a model as Megatron-LM v2.5 does: the release of its weights, for any number of processes.

    DIR/latest_checkpointed_iteration.txt              "release"
    DIR/release/mp_rank_XX[_YYY]/model_optim_rng.pt    of tensor-parallel process XX (and stage YYY)

`release` tells Megatron-LM that there is no optimizer to load, and to begin at iteration 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint, model_config, saved_tokenizer
from megatron.checkpoint.convert import check_is_empty
from megatron.checkpoint.nvidia.names import cut_dim, is_vocabulary, nest, rank_folder, stage_keys
from megatron.checkpoint.nvidia.read import RELEASE
from megatron.checkpoint.storage import TRACKER, check_room, replace_text, sync, sync_all
from megatron.flags import InputError, flag_name
from megatron.model.config import ModelConfig
from megatron.parallel.slices import GlobalSlice
from megatron.tokenizer import padded_vocab_size

# What a model must be for Megatron-LM v2.5 to have it.
NEEDED = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "group_query_attention": False,
    "qk_layernorm": False,
}


def write_megatron(
    checkpoint: Checkpoint,
    root: Path,
    advance: Callable[[int], object],
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
) -> None:
    """Write the weights of a checkpoint to the empty folder `root`, with one process's part in memory at a time;
    `advance` is told the bytes of each tensor that is read.

    Raises:
        InputError: Megatron-LM v2.5 has no such model, or cannot divide it so. Nothing is left then.
        OSError: it cannot be written; nor then.
    """
    config = model_config(checkpoint)
    _check_model(config)
    _check_layout(config, tensor_parallel, pipeline_parallel)
    check_is_empty(root)
    layout = Layout(checkpoint, config, tensor_parallel, pipeline_parallel)
    existed, temporary = root.exists(), root / f".writing-{RELEASE}"
    try:
        temporary.mkdir(parents=True)
        check_room(temporary, layout.nbytes)
        for p in range(pipeline_parallel):
            for t in range(tensor_parallel):
                folder = temporary / rank_folder(t, p, pipeline_parallel)
                folder.mkdir()
                content = {
                    "args": layout.args(),
                    "checkpoint_version": 3.0,
                    "iteration": checkpoint.iteration,
                }
                _save(content | {"model": layout.model(t, p, advance)}, folder / "model_optim_rng.pt")
        sync_all(temporary)
        temporary.rename(root / RELEASE)
        sync(root)
        replace_text(root / TRACKER, RELEASE)
    except BaseException:
        for left in (temporary, root / RELEASE) if existed else (root,):
            shutil.rmtree(left, ignore_errors=True)
        raise


def _save(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # Of a write that fails torch tells only that its archive has come out too short.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _check_model(config: ModelConfig) -> None:
    for field in dataclasses.fields(config):
        value, needed = getattr(config, field.name), NEEDED.get(field.name)
        if field.name in NEEDED and value != needed:
            raise InputError(
                f"{flag_name(field)}: Megatron-LM v2.5 has no model with {field.name} {value}, only {needed}"
            )


def _check_layout(config: ModelConfig, tensor_parallel: int, pipeline_parallel: int) -> None:
    for flag, size, what in (
        ("tensor", tensor_parallel, "num_attention_heads"),
        ("tensor", tensor_parallel, "ffn_hidden_size"),
        ("pipeline", pipeline_parallel, "num_layers"),
    ):
        total = getattr(config, what)
        if total % size:
            raise InputError(
                f"--target-{flag}-model-parallel-size: {size} does not divide the model's {what}, {total}"
            )


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model divided among T x P processes."""

    checkpoint: Checkpoint
    config: ModelConfig
    tensor: int
    pipeline: int

    @property
    def padded(self) -> int:
        """Rows of the table of words."""
        multiple = saved_tokenizer(self.checkpoint).make_vocab_size_divisible_by
        return padded_vocab_size(self.checkpoint.state["vocab_size"], multiple, self.tensor)

    def args(self) -> argparse.Namespace:
        """The flags that whatever reads the file asks for."""
        config, state = self.config, self.checkpoint.state
        tokenizer = saved_tokenizer(self.checkpoint)
        bf16 = self.dtype == torch.bfloat16
        return argparse.Namespace(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            ffn_hidden_size=config.ffn_hidden_size,
            kv_channels=config.kv_channels,
            seq_length=state["config"].get("data", {}).get("seq_length") or config.max_position_embeddings,
            max_position_embeddings=config.max_position_embeddings,
            padded_vocab_size=self.padded,
            orig_vocab_size=state["vocab_size"],
            make_vocab_size_divisible_by=tokenizer.make_vocab_size_divisible_by,
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            data_parallel_size=1,
            bias_gelu_fusion=config.bias_gelu_fusion,
            openai_gelu=config.openai_gelu,
            onnx_safe=None,
            layernorm_epsilon=config.norm_epsilon,
            apply_residual_connection_post_layernorm=config.apply_residual_connection_post_layernorm,
            attention_dropout=config.attention_dropout,
            hidden_dropout=config.hidden_dropout,
            init_method_std=config.init_method_std,
            init_method_xavier_uniform=config.init_method_xavier_uniform,
            params_dtype=self.dtype,
            fp16=False,
            bf16=bf16,
            tokenizer_type=tokenizer.tokenizer_type,
            rank=0,
            consumed_train_samples=0,
            consumed_valid_samples=0,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtypes = {tensor["dtype"] for tensor in self.checkpoint.pieces("model").index.values()}
        return torch.bfloat16 if dtypes == {"bfloat16"} else torch.float32

    @property
    def nbytes(self) -> int:
        """Of the tensors in all files."""
        names = [name for p in range(self.pipeline) for _, name in self.keys(p)]
        elements = sum(
            math.prod(self.place(name, t).local_shape) for name in names for t in range(self.tensor)
        )
        return elements * self.dtype.itemsize

    def keys(self, p: int) -> Iterator[tuple[str, str]]:
        """The keys of the tensors of stage `p`, and our names."""
        each = self.config.num_layers // self.pipeline
        return stage_keys(
            "decoder" if self.checkpoint.state["task"] == "GPT" else "encoder",
            range(p * each, (p + 1) * each),
            first=p == 0,
            last=p == self.pipeline - 1,
            names=self.checkpoint.pieces("model").index,
        )

    def model(self, t: int, p: int, advance: Callable[[int], object]) -> dict[str, Any]:
        """The nested dicts of the process `t` of stage `p`."""
        model: dict[str, Any] = {}
        for key, name in self.keys(p):
            tensor = self.part(name, t)
            nest(model, key, tensor)
            advance(tensor.nbytes)
        return model

    def place(self, name: str, t: int) -> GlobalSlice:
        """Which part of a tensor the process `t` holds."""
        shape, dim, real = tuple(self.checkpoint.pieces("model").index[name]["shape"]), cut_dim(name), None
        if is_vocabulary(name):
            real = min(shape[0], self.padded)
            shape = (self.padded, *shape[1:])
        length = shape[dim or 0] // (1 if dim is None else self.tensor)
        begin = 0 if dim is None else t * length
        return GlobalSlice(shape, dim or 0, ((begin, begin + length),), real=real)

    def part(self, name: str, t: int) -> Tensor:
        """The part of a tensor that the process `t` holds. Rows beyond those there are repeat the last id's, as in what
        NVIDIA's own tools make: there the padding takes part in the softmax."""
        tensors, place, ids = (
            self.checkpoint.pieces("model"),
            self.place(name, t),
            self.checkpoint.state["vocab_size"],
        )
        values = tensors.read(name, place)
        ((begin, end),) = place.ranges
        if place.real is not None and place.real < end:
            last = tensors.read(name, dataclasses.replace(place, ranges=((ids - 1, ids),)))
            values[max(0, place.real - begin) :] = last
        return values.to(self.dtype)
