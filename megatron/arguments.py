"""The configuration of a training run, from the command line, a YAML file and the checkpoint to load."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron import __version__
from megatron.checkpoint.config import CheckpointConfig
from megatron.cli import Parser, add_flags, clipped, make_config, nonempty
from megatron.data.config import DataConfig
from megatron.errors import InputError
from megatron.flags import Config, flag_name
from megatron.optim.config import LOSS_SCALING
from megatron.settings_file import read_settings
from megatron.training.config import PLUGIN_CONFIGS, RunConfig

# Functions that add the flags of plug-ins to a parser, filled by `megatron.plugins`. Their actions append messages to
# the namespace: `notices` are printed, `refusals` end the command.
PARSER_EXTENSIONS: list[Callable[[Parser], None]] = []


def parse_run_config(argv: Sequence[str], *, description: str, defaults: dict[str, Any]) -> RunConfig:
    """Build the configuration of a training run from its command line.

    Args:
        defaults: values, by field, that an entry point prefers to the dataclasses' defaults.

    Raises:
        InputError: a flag, a value, or a combination of values is wrong.
    """
    return run_config(run_values(argv, run_parser(description, defaults), defaults))


def run_parser(
    description: str,
    defaults: Mapping[str, Any],
    *,
    own: Mapping[str, type[Config]] | None = None,
    without: Container[str] = (),
) -> Parser:
    """Make the parser of a training run: a group of flags for each section of `RunConfig`, and plug-ins' flags.

    Args:
        own: further groups of the entry point, by title, which come first.
        without: fields of `RunConfig` that the entry point has no flag for.
    """
    parser = Parser(description=description)
    parser.add_argument("--version", action="version", version=f"megatron {__version__}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of flags without their leading dashes; the command line overrides it, but cannot turn off "
        "a switch that the file turns on",
    )
    for name, kind in (own or {}).items():
        add_flags(parser, kind, name, defaults)
    for name, kind in RunConfig.section_types().items():
        add_flags(parser, kind, name.replace("_", " "), defaults, without)
    for extend in PARSER_EXTENSIONS:
        extend(parser)
    return parser


def run_values(
    argv: Sequence[str],
    parser: Parser,
    defaults: dict[str, Any],
    *,
    model_folder: Callable[[CheckpointConfig], str | None] = lambda config: None,
) -> dict[str, Any]:
    """Collect the values of a training run's flags, by field.

    In order of precedence: the architecture in the checkpoint of --use-checkpoint-args, the command line, the file of
    --config, the rest of that checkpoint, `defaults`. Rank 0 prints notes about flags without effect.

    Args:
        model_folder: gives the folder whose checkpoint is used as if by --use-checkpoint-args when that flag is absent.

    Raises:
        InputError: a flag or a value is wrong.
    """
    namespace = argparse.Namespace(notices=[], refusals=[])
    # Parsed as if the file's settings stood before the command line, which therefore overrides them.
    config_file = _config_file(argv)
    if config_file is not None:
        try:
            parser.parse_args(_read_settings(config_file, parser), namespace)
        except InputError as error:
            raise InputError(f"--config {config_file}: {error}") from None
    given = vars(parser.parse_args(argv, namespace))
    checkpoint = make_config(CheckpointConfig, given)
    folder = checkpoint.load if checkpoint.use_checkpoint_args else model_folder(checkpoint)
    if folder is not None:
        step = checkpoint.ckpt_step if folder == checkpoint.load else None
        given = _with_checkpoint_args(given, dataclasses.replace(checkpoint, load=folder, ckpt_step=step))
    values = defaults | given
    values["notices"] += _without_effect(values)
    for notice in dict.fromkeys(values.pop("notices")):
        if os.environ.get("RANK", "0") == "0":
            print(f"note: {notice}", file=sys.stderr)
    return values


def _without_effect(values: dict[str, Any]) -> list[str]:
    """Notes on flags that have no effect because of another flag's value."""
    notes = []
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        notes.append("--sequence-parallel has no effect: --tensor-model-parallel-size is 1")
    if not values.get("fp16"):
        names = [f"--{name.replace('_', '-')}" for name in LOSS_SCALING if name in values]
        notes += [f"{name} has no effect: only --fp16 uses loss scaling" for name in names]
    if values.get("fp32_residual_connection") and not (values.get("fp16") or values.get("bf16")):
        notes.append("--fp32-residual-connection has no effect: the run is in fp32 (no --bf16 or --fp16)")
    return notes + [note for kind in PLUGIN_CONFIGS.values() for note in kind.without_effect(values)]


def _with_checkpoint_args(given: dict[str, Any], config: CheckpointConfig) -> dict[str, Any]:
    """Add the values that the checkpoint of --load supplies.

    The model's architecture overrides what is given. The model's other values, --seq-length and the tokenizer are used
    where nothing is given. A folder that is also --save may be empty and then supplies nothing.
    """
    # Imported here because it imports torch, which takes seconds, and most command lines do not need it.
    from megatron.checkpoint.checkpoint import is_architecture, model_config, saved_tokenizer
    from megatron.checkpoint.find import find_checkpoint

    assert config.load is not None
    save = None if config.finetune else config.save
    checkpoint = find_checkpoint(config.load, save, step=config.ckpt_step, verify=False)
    if checkpoint is None:
        return given
    model, tokenizer = model_config(checkpoint), saved_tokenizer(checkpoint)
    fixed = {name: value for name, value in vars(model).items() if is_architecture(name, model)}
    free = vars(model) | {"seq_length": checkpoint.state["config"].get("data", {}).get("seq_length")}
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
    return flag_name(field) if isinstance(value, bool) else f"{flag_name(field)} {value}"


def _config_file(argv: Sequence[str]) -> Path | None:
    finder = Parser(add_help=False)
    finder.add_argument("--config", type=nonempty)
    found, _ = finder.parse_known_args(argv)
    return None if found.config is None else Path(found.config)


def _read_settings(path: Path, parser: Parser) -> list[str]:
    """Convert the settings in a YAML file to command-line arguments."""
    names = {name.replace("_", "-"): name for name in parser.flags}
    arguments: list[str] = []
    for key, value in read_settings(path).items():
        dashed = "--" + key.replace("_", "-")
        if dashed in ("--config", "--help", "--version"):
            raise InputError(f"{key}: belongs on the command line")
        name = names.get(dashed)
        # The parser rejects an unknown name and suggests another.
        arguments += [dashed] if name is None else _setting(name, value, parser.flags[name])
    return arguments


def _setting(name: str, value: Any, action: argparse.Action) -> list[str]:
    """Convert one setting to command-line arguments; null means that the flag is not given."""
    if value is None:
        return []
    shown = "a mapping" if isinstance(value, dict) else clipped(value)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{name}: {shown} is not true or false")
        return [name] if value else []
    several = action.nargs not in (None, 1)
    values = value if several and isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, str | int | float) for v in values):
        raise InputError(f"{name}: {shown} is not {'a list of values' if several else 'a single value'}")
    return [name, *map(str, values)] if several else [f"{name}={value}"]


def run_config(values: dict[str, Any]) -> RunConfig:
    """Build the configuration from the values of its fields.

    Raises:
        InputError: a combination of values is wrong.
    """
    data = make_config(DataConfig, values)
    data.require("seq_length")
    values = {"max_position_embeddings": data.seq_length} | values
    sections: dict[str, Any] = {
        name: make_config(kind, values) for name, kind in RunConfig.section_types().items()
    }
    plugins = {title: sections.pop(title) for title in PLUGIN_CONFIGS}
    config = RunConfig(**sections, plugins=plugins)
    _check_across(config)
    return config


def _check_across(config: RunConfig) -> None:
    """Check combinations of flags from two sections of the configuration."""
    training, optimizer = config.training, config.optimizer
    length, longest = config.data.seq_length, config.model.max_position_embeddings
    if length is not None and longest is not None and length > longest:
        raise InputError(f"--seq-length: {length} is longer than --max-position-embeddings {longest}")
    for section in config.plugins.values():
        section.check(config)
    by_samples = {
        "--lr-decay-samples": optimizer.lr_decay_samples,
        "--lr-warmup-samples": optimizer.lr_warmup_samples,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples,
    }
    by_iters = {
        "--lr-decay-iters": optimizer.lr_decay_iters,
        "--lr-warmup-iters": optimizer.lr_warmup_iters,
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters,
    }
    unit, other = ("iters", by_samples) if training.train_iters is not None else ("samples", by_iters)
    for name, value in other.items():
        if value:
            fitting = name.replace("samples", unit).replace("iters", unit)
            raise InputError(f"{name}: {value} does not go with --train-{unit}; use {fitting}")
