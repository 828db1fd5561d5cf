"""Settings from the checkpoint to load (--use-checkpoint-args)."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any

from megatron.checkpoint.config import CheckpointConfig
from megatron.cli import make_config
from megatron.data.config import DataConfig
from megatron.errors import InputError
from megatron.flags import Config, flag_name


def add_checkpoint_args(
    given: dict[str, Any], model_folder: Callable[[CheckpointConfig], str | None] = lambda config: None
) -> dict[str, Any]:
    """Add the values that the checkpoint of --use-checkpoint-args supplies to those given.

    Args:
        model_folder: gives the folder whose checkpoint is used as if by --use-checkpoint-args when that flag is absent.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = make_config(CheckpointConfig, given)
    wanted = given.get("use_checkpoint_args", False)
    if wanted and checkpoint.load is None:
        raise InputError("--use-checkpoint-args needs --load, the folder of the checkpoints")
    folder = checkpoint.load if wanted else model_folder(checkpoint)
    if folder is None:
        return given
    step = checkpoint.ckpt_step if folder == checkpoint.load else None
    return _with_checkpoint_args(given, dataclasses.replace(checkpoint, load=folder, ckpt_step=step))


def _with_checkpoint_args(given: dict[str, Any], config: CheckpointConfig) -> dict[str, Any]:
    """Add the values that the checkpoint of --load supplies.

    The model's architecture overrides what is given, except that --finetune may change RoPE. The model's other values,
    --seq-length and the tokenizer are used where nothing is given. A folder that is also --save may be empty and then
    supplies nothing.
    """
    # Not imported above: reading checkpoints needs torch, reading the command line does not.
    from megatron.checkpoint.checkpoint import ROPE_FIELDS, is_architecture, model_config
    from megatron.checkpoint.find import find_checkpoint
    from megatron.checkpoint.formats import FORMATS
    from megatron.checkpoint.tokenizer import saved_tokenizer
    from megatron.interop.formats import EXTERNAL_FORMATS
    from megatron.settings.rolled_back import without_repetition

    FORMATS.update(EXTERNAL_FORMATS)
    config = without_repetition(config)
    assert config.load is not None
    save = None if config.finetune else config.save
    checkpoint = find_checkpoint(config.load, save, step=config.ckpt_step, verify=False)
    if checkpoint is None:
        return given
    model, tokenizer = model_config(checkpoint), saved_tokenizer(checkpoint)
    kept = {name: value for name, value in vars(model).items() if is_architecture(name, model)}
    # With --finetune what is given of RoPE wins.
    fixed = {k: v for k, v in kept.items() if not (config.finetune and k.startswith(ROPE_FIELDS))}
    # Flags of RoPE that a model without it was trained with have no effect, and would be refused.
    unused = ROPE_FIELDS if model.position_embedding_type != "rope" else ()
    free = {name: value for name, value in vars(model).items() if not name.startswith(unused)}
    free |= {"seq_length": checkpoint.state["config"].get("data", {}).get("seq_length")}
    if "seq_length" in given:
        del free["max_position_embeddings"]  # follows from --seq-length
    if given.get("tokenizer_type", tokenizer.tokenizer_type) == tokenizer.tokenizer_type:
        free |= vars(tokenizer)
    taken = {name: value for name, value in free.items() if value is not None and name not in given} | fixed

    configs: tuple[type[Config], ...] = (type(model), DataConfig, type(tokenizer))
    fields = {field.name: field for kind in configs for field in dataclasses.fields(kind)}
    shown = [
        _as_flag(f, taken[name]) for name, f in fields.items() if taken.get(name, f.default) != f.default
    ]
    overridden = [
        _as_flag(fields[name], given[name]) for name in fixed if given.get(name, fixed[name]) != fixed[name]
    ]
    instead = f", in place of {' '.join(overridden)}" if overridden else ""
    notice = f"--load: {checkpoint.folder} gives {' '.join(shown)}{instead}"
    return given | taken | {"notices": [*given["notices"], notice]}


def _as_flag(field: dataclasses.Field, value: Any) -> str:
    if isinstance(value, bool):
        return flag_name(field)
    return f"{flag_name(field)} {shlex.join(map(str, value if isinstance(value, tuple) else (value,)))}"
