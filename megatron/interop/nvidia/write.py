"""Write a model's weights as a release of Megatron-LM v2.5, for any number of ranks.

    DIR/latest_checkpointed_iteration.txt              "release"
    DIR/release/mp_rank_XX[_YYY]/model_optim_rng.pt    tensor-parallel rank XX (and stage YYY)

Megatron-LM loads no optimizer from a release, and starts at iteration 0.
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

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.storage import TRACKER, check_room, replace_text, sync, sync_all
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.errors import InputError
from megatron.flags import flag_name
from megatron.interop.convert import check_is_empty
from megatron.interop.nvidia.names import is_vocabulary, nest, rank_folder, shard_dim, stage_keys
from megatron.interop.nvidia.read import RELEASE
from megatron.model.config import ModelConfig
from megatron.parallel.slices import GlobalSlice
from megatron.tokenizer import padded_vocab_size

# The architecture that Megatron-LM v2.5 supports.
REQUIRED = {
    "num_experts": None,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "group_query_attention": False,
    "qk_layernorm": False,
    "activation_function": "gelu",
    "use_parallel_residual": False,
    "norm_after": False,
    "embed_layernorm": False,
    "scale_embeddings": False,
    "apply_layernorm_1p": False,
    "window_size": None,
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sandwich_norm": False,
}


def write_megatron(
    checkpoint: Checkpoint,
    root: Path,
    advance: Callable[[int], object],
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
) -> None:
    """Write the weights of a checkpoint to the empty folder `root`, with one rank's shards in memory at a time.

    A failure leaves no files behind. `advance` receives the bytes of each tensor read.

    Raises:
        InputError: Megatron-LM v2.5 does not support the model or the layout.
        OSError: the files cannot be written.
    """
    config = model_config(checkpoint)
    _check_model(config)
    _check_layout(config, tensor_parallel, pipeline_parallel)
    check_is_empty(root)
    shards = ShardedModel(checkpoint, config, tensor_parallel, pipeline_parallel)
    existed, temporary = root.exists(), root / f".writing-{RELEASE}"
    try:
        temporary.mkdir(parents=True)
        check_room(temporary, shards.nbytes)
        for p in range(pipeline_parallel):
            for t in range(tensor_parallel):
                folder = temporary / rank_folder(t, p, pipeline_parallel)
                folder.mkdir()
                content = {
                    "args": shards.args(),
                    "checkpoint_version": 3.0,
                    "iteration": checkpoint.iteration,
                }
                _save(content | {"model": shards.model(t, p, advance)}, folder / "model_optim_rng.pt")
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
            # torch reports a failed write as an archive that is too short.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _check_model(config: ModelConfig) -> None:
    for field in dataclasses.fields(config):
        value, required = getattr(config, field.name), REQUIRED.get(field.name)
        if field.name in REQUIRED and value != required:
            raise InputError(
                f"{flag_name(field)}: Megatron-LM v2.5 supports only {field.name} {required}, not {value}"
            )


def _check_layout(config: ModelConfig, tensor_parallel: int, pipeline_parallel: int) -> None:
    for flag, size, name in (
        ("tensor", tensor_parallel, "num_attention_heads"),
        ("tensor", tensor_parallel, "ffn_hidden_size"),
        ("pipeline", pipeline_parallel, "num_layers"),
    ):
        total = getattr(config, name)
        if total % size:
            raise InputError(
                f"--target-{flag}-model-parallel-size: {size} does not divide the model's {name}, {total}"
            )


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model divided among T x P ranks."""

    checkpoint: Checkpoint
    config: ModelConfig
    tensor: int
    pipeline: int

    @property
    def padded(self) -> int:
        """The rows of the word embeddings, with padding."""
        multiple = saved_tokenizer(self.checkpoint).make_vocab_size_divisible_by
        return padded_vocab_size(self.checkpoint.state["vocab_size"], multiple, self.tensor)

    def args(self) -> argparse.Namespace:
        """The flags that Megatron-LM and its converters read from the file."""
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
        """The dtype of the weights."""
        dtypes = {tensor["dtype"] for tensor in self.checkpoint.tensors["model"].index.values()}
        return torch.bfloat16 if dtypes == {"bfloat16"} else torch.float32

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors in all files."""
        names = [name for p in range(self.pipeline) for _, name in self.keys(p)]
        elements = sum(
            math.prod(self.shard_spec(name, t).local_shape) for name in names for t in range(self.tensor)
        )
        return elements * self.dtype.itemsize

    def keys(self, p: int) -> Iterator[tuple[str, str]]:
        """The keys of the tensors of stage `p`, with their native names."""
        each = self.config.num_layers // self.pipeline
        return stage_keys(
            "decoder" if self.checkpoint.state["task"] == "GPT" else "encoder",
            range(p * each, (p + 1) * each),
            first=p == 0,
            last=p == self.pipeline - 1,
            names=self.checkpoint.tensors["model"].index,
        )

    def model(self, t: int, p: int, advance: Callable[[int], object]) -> dict[str, Any]:
        """The nested dicts of tensor-parallel rank `t` in stage `p`."""
        model: dict[str, Any] = {}
        for key, name in self.keys(p):
            tensor = self.shard(name, t)
            nest(model, key, tensor)
            advance(tensor.nbytes)
        return model

    def shard_spec(self, name: str, t: int) -> GlobalSlice:
        """The shard of a tensor on tensor-parallel rank `t`."""
        shape, dim = tuple(self.checkpoint.tensors["model"].index[name]["shape"]), shard_dim(name)
        num_valid_rows = None
        if is_vocabulary(name):
            num_valid_rows = min(shape[0], self.padded)
            shape = (self.padded, *shape[1:])
        length = shape[dim or 0] // (1 if dim is None else self.tensor)
        begin = 0 if dim is None else t * length
        return GlobalSlice(shape, dim or 0, ((begin, begin + length),), num_valid_rows=num_valid_rows)

    def shard(self, name: str, t: int) -> Tensor:
        """The values of a tensor on tensor-parallel rank `t`.

        Rows of padding repeat the row of the last id, as in the output of NVIDIA's own tools, because the padding is
        part of Megatron-LM's softmax.
        """
        tensors, spec = self.checkpoint.tensors["model"], self.shard_spec(name, t)
        ids = self.checkpoint.state["vocab_size"]
        values = tensors.read(name, spec)
        ((begin, end),) = spec.ranges
        if spec.num_valid_rows is not None and spec.num_valid_rows < end:
            last = tensors.read(name, dataclasses.replace(spec, ranges=((ids - 1, ids),)))
            values[max(0, spec.num_valid_rows - begin) :] = last
        return values.to(self.dtype)
