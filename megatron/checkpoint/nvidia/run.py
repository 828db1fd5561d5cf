"""What the flags that Megatron-LM keeps in its checkpoints say of a model and of the run that made it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.checkpoint.foreign import weights_state
from megatron.checkpoint.unpickle import Record
from megatron.flags import InputError
from megatron.model.config import ModelConfig
from megatron.optim.schedule import Schedule
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.tokenizer.config import TokenizerConfig

# Flags that change what the tensors are, and that the files of no version up to 3.0 have.
NOT_READ = (
    "swiglu",
    "num_experts",
    "group_query_attention",
    "use_rotary_position_embeddings",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
    "squared_relu",
)


def read_config(
    path: Path, args: Record, sizes: dict[str, int], num_attention_heads: int | None
) -> ModelConfig:
    """The architecture of the model of a checkpoint.

    Args:
        path: the file that holds `args`, for messages.
        args: the flags of the run; empty where the file has none, as NVIDIA's released models.
        sizes: fields of the config that follow from the tensors.
        num_attention_heads: which do not; needed where the flags do not say.

    Raises:
        InputError: the number of heads is needed or wrong, or the model is of a kind that we have not.
    """
    for name in NOT_READ:
        if args.get(name):
            raise InputError(
                f"{path}: was trained with --{name.replace('_', '-')}, which is not read from this format"
            )
    heads = args.get("num_attention_heads", num_attention_heads)
    if heads is None:
        raise InputError(f"--num-attention-heads is required: {path} does not say how many there are")
    if num_attention_heads not in (None, heads):
        raise InputError(
            f"--num-attention-heads: {num_attention_heads}, but {path} says {heads}; leave it out"
        )
    said = {field.name: args.get(field.name) for field in dataclasses.fields(ModelConfig)}
    said |= {"norm_epsilon": args.get("layernorm_epsilon"), "num_attention_heads": heads}
    said = {name: value for name, value in said.items() if value is not None}
    for name, size in sizes.items():
        if said.get(name, size) != size:
            raise InputError(
                f"{path}: says that {name} is {str(said[name])[:20]}, but by its tensors it is {size}"
            )
    try:
        # There the padding of the vocabulary takes part in the softmax.
        return ModelConfig(**sizes | said | {"mask_padded_vocab": False})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_state(
    path: Path,
    content: dict[str, Any],
    args: Record,
    *,
    task: str,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    padded: int,
    bf16: bool,
) -> dict[str, Any]:
    """The state of the checkpoint whose file is `path` and holds `content`.

    Args:
        tokenizer: as given by the user; it says how many ids there are, if `args` does not.
        padded: rows of the table of words.
    """
    vocab_size = _vocab_size(path, args, tokenizer, padded)
    multiple = args.get("make_vocab_size_divisible_by", tokenizer.make_vocab_size_divisible_by)
    tokenizer = dataclasses.replace(tokenizer, vocab_size=None, make_vocab_size_divisible_by=multiple)
    state = weights_state(task, model, tokenizer, vocab_size=vocab_size, bf16=bf16)
    state["padded_vocab_size"] = padded
    config = state["config"]
    config["data"]["seq_length"] = args.get("seq_length", model.max_position_embeddings)
    schedule = content.get("lr_scheduler") or content.get("opt_param_scheduler")
    if not schedule:
        return state
    config["training"]["seed"] = args.get("seed")
    config["data"]["mock_data"] = False
    for name in ("data_path", "split", "dataloader_type", "mask_prob", "short_seq_prob"):
        config["data"][name] = args.get(name)
    iteration = content.get("iteration", content.get("total_iters"))
    batch = args.get("global_batch_size")
    samples = args.get("train_samples") or (args.get("train_iters") or 0) * (batch or 0)
    consumed = args.get("consumed_train_samples") or (iteration or 0) * (batch or 0)
    numbers = {
        "iteration": iteration,
        "global_batch_size": batch,
        "train_samples": samples,
        "consumed": consumed,
    }
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise InputError(f"{path}: does not say where its run stands ({name} is {str(value)[:40]})")
    return state | {
        "iteration": iteration,
        "consumed_samples": consumed,
        "train_samples": samples,
        "schedule": dataclasses.asdict(_schedule(path, schedule, args, samples)),
    }


def _vocab_size(path: Path, args: Record, tokenizer: TokenizerConfig, padded: int) -> int:
    """Ids of the tokenizer: the file itself mostly knows only to how many they were padded."""
    if tokenizer.tokenizer_type is not None:
        size, source = build_tokenizer(tokenizer).vocab_size, f"the tokenizer ({tokenizer.tokenizer_type})"
    elif tokenizer.vocab_size is not None:
        size, source = tokenizer.vocab_size, "--vocab-size"
    elif args.get("orig_vocab_size") is not None:
        size, source = args.get("orig_vocab_size"), "orig_vocab_size in it"
    else:
        raise InputError(
            f"{path}: says how many rows its table of words has, {padded}, but not how many of them are ids; give the "
            "tokenizer (--tokenizer-type and its files) or --vocab-size"
        )
    multiple, parts = args.get("make_vocab_size_divisible_by"), args.get("tensor_model_parallel_size", 1)
    fits = type(size) is int and 0 < size <= padded
    if fits and multiple:
        fits = padded_vocab_size(size, multiple, parts) == padded
    if not fits:
        raise InputError(
            f"{path}: its table of words has {padded} rows, which is not what {size} ids are padded to, the number "
            f"that {source} gives; give the tokenizer that it was trained with"
        )
    return size


def _schedule(path: Path, saved: dict[str, Any], args: Record, train_samples: int) -> Schedule:
    """The schedules of the run: that of the learning rate as it was saved, in samples."""
    decay = args.get("weight_decay", 0.01)
    old = {"max_lr": "start_lr", "warmup_steps": "warmup_iter", "decay_steps": "end_iter"}
    found = {
        name: saved.get(name, saved.get(old.get(name)))
        for name in ("max_lr", "min_lr", "warmup_steps", "decay_steps", "decay_style")
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise InputError(f"{path}: its schedule of the learning rate lacks {', '.join(missing)}")
    return Schedule(
        max_lr=found["max_lr"],
        min_lr=found["min_lr"],
        init_lr=0.0,
        warmup=found["warmup_steps"],
        decay=found["decay_steps"],
        decay_style=found["decay_style"],
        wsd_decay=0,
        wsd_decay_style="exponential",
        start_weight_decay=saved.get("start_wd", decay),
        end_weight_decay=saved.get("end_wd", decay),
        weight_decay_style=saved.get("wd_incr_style", "constant"),
        train_samples=train_samples,
    )
