"""Runs of current Megatron-LM in the format torch_dist, which torch.distributed.checkpoint writes here."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from nvidia import VOCAB
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.tokenizer.config import TokenizerConfig

LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)
FLAGS = {
    "global_batch_size": 8,
    "train_iters": 20,
    "consumed_train_samples": 96,
    "seq_length": 16,
    "seed": 1234,
    "orig_vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 4,
    "lr_warmup_init": 1e-6,
    "lr_wsd_decay_style": "linear",
    "lr_wsd_decay_iters": 4,
}
SCHEDULE = {
    "max_lr": 1e-3,
    "min_lr": 1e-5,
    "lr_warmup_steps": 8,
    "num_steps": 96,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 160,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 160,
}
# State of the distributed optimizer in the state that all ranks share.
DISTRIBUTED = {"optimizer": {"param_groups": [{"lr": 1e-3}, {"lr": 1e-3, "step": 12}]}}


def in_stacks(tensors: dict[str, Tensor], *, fused: bool = True) -> dict[str, Tensor]:
    """Stack the tensors of all layers, with fused or separate norms."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        theirs = name
        if name.startswith("decoder.layers."):
            theirs = "decoder.layers." + name.split(".", 3)[3]
        if fused:
            theirs = theirs.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            theirs = theirs.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        found.setdefault(theirs, []).append(tensor)
    return {
        name: torch.stack(xs) if name.startswith("decoder.layers.") else xs[0] for name, xs in found.items()
    }


class Shards:
    """A tensor that is written in shards: a vector for each index of the leading dimensions, in two parts."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.parts = whole, {}
        bounds = (0, max(1, 2 * whole.shape[-1] // 3), whole.shape[-1])
        for index in itertools.product(*map(range, whole.shape[:-1])):
            for begin, end in itertools.pairwise(bounds):
                if begin < end:
                    part = whole[index][begin:end].reshape(*(1 for _ in index), -1)
                    self.parts[torch.Size((*index, begin))] = part.contiguous()

    def __create_write_items__(self, name: str, shards: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.whole)
        return [
            WriteItem(
                index=MetadataIndex(name, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=part.shape),
                    properties=properties,
                    size=self.whole.shape,
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offset, sizes=part.shape) for offset, part in self.parts.items()]


class Planner(dcp.DefaultSavePlanner):
    """Writes `Shards`, and objects that are serialized already, as Megatron-LM's planner does."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.parts[index.offset] if isinstance(value, Shards) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def save(folder: Path, tensors: dict[str, Any]) -> Path:
    dcp.save(tensors, checkpoint_id=folder, planner=Planner(), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


def write(folder: Path, tensors: dict[str, Any], common: dict[str, Any]) -> Path:
    save(folder, tensors)
    torch.save(common, folder / "common.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("12")
    return folder


def common_state(checkpoint: Checkpoint, optimizer: object, **other: object) -> dict[str, Any]:
    flags = vars(model_config(checkpoint)) | {"num_query_groups": 1} | FLAGS
    return {
        "args": argparse.Namespace(**flags),
        "iteration": 12,
        "optimizer": optimizer,
        "opt_param_scheduler": SCHEDULE,
        **other,
    }
