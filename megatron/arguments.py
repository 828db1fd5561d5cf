"""The configuration of a training run, from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from megatron import __version__
from megatron.cli import Parser, add_flags, make_config
from megatron.data.config import DataConfig
from megatron.errors import InputError
from megatron.flags import Config, flag_name
from megatron.optim.registry import OPTIMIZERS
from megatron.training.config import PLUGIN_CONFIGS, RunConfig

# Functions that add the flags of plug-ins to a parser, filled by `megatron.plugins`. Their actions append messages to
# the namespace: `notices` are printed, `refusals` end the command.
PARSER_EXTENSIONS: list[Callable[[Parser], None]] = []
# Functions that parse other words than those of the command line, which overrides them. Filled by `megatron.plugins`.
BEFORE_COMMAND_LINE: list[Callable[[Sequence[str], Parser, argparse.Namespace], None]] = []
# Functions from values by field, without and with defaults, to those to use. Filled by `megatron.plugins`.
AFTER_COMMAND_LINE: list[Callable[[dict[str, Any]], dict[str, Any]]] = []
AFTER_DEFAULTS: list[Callable[[dict[str, Any]], dict[str, Any]]] = []


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
    parser = Parser(description=description, add_help=False)  # --help GROUP is a plug-in
    parser.add_argument("--version", action="version", version=f"megatron {__version__}")
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
    after: Sequence[Callable[[dict[str, Any]], dict[str, Any]]] = AFTER_COMMAND_LINE,
) -> dict[str, Any]:
    """Collect the values of a training run's flags, by field.

    The command line overrides what `BEFORE_COMMAND_LINE` gives, and both override `defaults`. Rank 0 prints notices.

    Args:
        after: functions that change the values given.

    Raises:
        InputError: a flag or a value is wrong.
    """
    namespace = argparse.Namespace(notices=[], refusals=[])
    for parse_before in BEFORE_COMMAND_LINE:
        parse_before(argv, parser, namespace)
    given = vars(parser.parse_args(argv, namespace))
    for change in after:
        given = change(given)
    values = defaults | given
    notices = values.pop("notices") + _without_effect(values)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"note: {notice}\n" for notice in dict.fromkeys(notices))
    return values


def _without_effect(values: dict[str, Any]) -> list[str]:
    """Notes on flags that have no effect because of another flag's value."""
    notes = []
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        notes.append("--sequence-parallel has no effect: --tensor-model-parallel-size is 1")
    if values.get("fp32_residual_connection") and not (values.get("fp16") or values.get("bf16")):
        notes.append("--fp32-residual-connection has no effect: the run is in fp32 (no --bf16 or --fp16)")
    optimizer = values.get("optimizer", "adam")
    in_use = ("muon", "adam") if optimizer == "muon" else (optimizer,)  # AdamW updates what Muon does not
    used = [kind.config_class for name, kind in OPTIMIZERS.items() if name in in_use]
    for kind in OPTIMIZERS.values():
        if kind.config_class not in used:
            given = [flag_name(f) for f in dataclasses.fields(kind.config_class) if f.name in values]
            notes += [f"{flag} has no effect with --optimizer {optimizer}" for flag in given]
    if values.get("lr_decay_style") != "WSD":
        given = [f"--{name.replace('_', '-')}" for name in values if name.startswith("lr_wsd_")]
        notes += [f"{flag} has no effect without --lr-decay-style WSD" for flag in given]
    return notes + [note for kind in PLUGIN_CONFIGS.values() for note in kind.without_effect(values)]


def run_config(values: dict[str, Any]) -> RunConfig:
    """Build the configuration from the values of its fields.

    Raises:
        InputError: a combination of values is wrong.
    """
    data = make_config(DataConfig, values)
    data.require("seq_length")
    for change in AFTER_DEFAULTS:
        values = change(values)
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
    parts, given = config.parallel.expert_tp, config.parallel.expert_tensor_parallel_size
    if config.model.num_experts is not None and optimizer.optimizer == "muon" and parts != 1:
        raise InputError(
            f"--expert-tensor-parallel-size: {parts}{'' if given else ' (from --tensor-model-parallel-size)'} does not "
            "go with --optimizer muon, which updates the whole matrices of experts; use 1"
        )
    for section in config.plugins.values():
        section.check(config)
    if training.train_iters is None and training.train_samples is None:
        raise InputError("--train-iters or --train-samples is required: how long to train")
    unit, other = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    for name in ("lr-decay", "lr-warmup", "lr-wsd-decay"):
        if value := getattr(optimizer, f"{name}-{other}".replace("-", "_")):
            raise InputError(
                f"--{name}-{other}: {value} does not go with --train-{unit}; use --{name}-{unit}"
            )
