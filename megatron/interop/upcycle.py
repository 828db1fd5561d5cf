"""Turn a dense GPT into a mixture of experts whose experts all begin as its MLPs (arXiv 2212.05055)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.errors import InputError
from megatron.interop.external import ExternalTensor, ExternalTensors, meta_model, weights_only_state
from megatron.model.config import ModelConfig
from megatron.parallel.parameters import ShardedParameter, named_parameters
from megatron.parallel.slices import whole

# Seed of the router's initial values.
SEED = 1234
# The dense MLP's tensor, by the experts' tensor that copies it.
DENSE = {"experts.weight1": "linear_fc1.weight", "experts.weight2": "linear_fc2.weight"}


def upcycled(checkpoint: Checkpoint, fields: dict[str, Any]) -> Checkpoint:
    """The weights of a dense GPT as a mixture of experts. Each layer's MLP is read once.

    Args:
        fields: fields of the model's config that describe the experts and their router.

    Raises:
        InputError: the checkpoint holds no dense GPT, or experts cannot be copies of its MLPs.
    """
    if checkpoint.state["task"] != "GPT":
        raise InputError(
            f"--moe-use-upcycling: {checkpoint.folder} holds a {checkpoint.state['task']}, not a GPT"
        )
    dense = model_config(checkpoint)
    if dense.num_experts is not None:
        raise InputError(f"--moe-use-upcycling: {checkpoint.folder} already has {dense.num_experts} experts")
    if dense.mtp_num_layers:
        raise InputError(
            f"--moe-use-upcycling: {checkpoint.folder} has layers of multi-token prediction (--mtp-num-layers "
            f"{dense.mtp_num_layers}), which are not supported"
        )
    if dense.add_bias_linear or dense.add_mlp_bias:
        raise InputError(
            f"--moe-use-upcycling: the MLPs in {checkpoint.folder} have biases, which experts lack"
        )
    if fields.get("num_experts") is None:
        raise InputError("--moe-use-upcycling needs --num-experts")
    model = ModelConfig(**vars(dense) | fields)
    if model.moe_ffn_hidden_size != dense.ffn_hidden_size:
        raise InputError(
            f"--moe-ffn-hidden-size: {model.moe_ffn_hidden_size} is not the width of the dense MLP, "
            f"{dense.ffn_hidden_size}, of which the experts are copies; leave it out"
        )
    if model.moe_shared_expert_intermediate_size is not None:
        raise InputError(
            "--moe-shared-expert-intermediate-size: the dense model has no shared expert; leave it out"
        )
    source, state = checkpoint.tensors["model"], checkpoint.state
    dtypes = {tensor["dtype"] for tensor in source.index.values()}
    tensors = {}

    @functools.lru_cache(maxsize=1)
    def read(name: str) -> Tensor:
        return source.read(name, whole(*source.index[name]["shape"])).to(
            getattr(torch, source.index[name]["dtype"])
        )

    for name, p in named_parameters(meta_model("GPT", model, state["vocab_size"])):
        shape = tuple(source.index.get(name, {"shape": p.shape})["shape"])
        layer, _, module = name.partition(".mlp.")
        if name in source.index:
            parts = [functools.partial(read, name)]
        elif module in DENSE:
            dense_name = f"{layer}.mlp.{DENSE[module]}"
            parts = [functools.partial(_expert, read, dense_name, module)] * (model.num_experts or 0)
        else:
            parts = [functools.partial(_initial, name, p)]
        dtype = torch.bfloat16 if dtypes == {"bfloat16"} else torch.float32
        tensors[name] = ExternalTensor(shape, dtype, tuple(parts))
    new = weights_only_state(
        "GPT", model, saved_tokenizer(checkpoint), vocab_size=state["vocab_size"], bf16=dtypes == {"bfloat16"}
    )
    new["padded_vocab_size"] = state["padded_vocab_size"]
    notes = checkpoint.notes
    if not keeps_outputs(model):
        notes = (
            *notes,
            "the weights of a token's experts do not sum to 1, so the model differs from the dense one",
        )
    return Checkpoint(
        checkpoint.folder, new, {"model": ExternalTensors(checkpoint.folder, tensors)}, notes=notes
    )


def keeps_outputs(model: ModelConfig) -> bool:
    """True if the weights of a token's experts sum to 1, so that equal experts compute what one does."""
    sigmoid = model.moe_router_score_function == "sigmoid"
    normalized = model.moe_router_topk > 1 if sigmoid else not model.moe_router_pre_softmax
    return normalized and model.moe_router_topk_scaling_factor in (None, 1.0)


def _expert(read: Any, name: str, module: str) -> Tensor:
    return read(name).t() if module == "experts.weight2" else read(name)


def _initial(name: str, p: ShardedParameter) -> Tensor:
    values = torch.empty(p.shape)
    p.init(values, p.shard_spec, SEED, name)
    return values
