"""The command line: configuration dataclasses to flags and back.

This is the only module that knows argparse. Flags carry Megatron-LM's names; what a flag means, its default
and its range stand with its field in the subsystem's config dataclass.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import yaml

from megatron import __version__
from megatron.flags import Config, Flag, InputError, TrainingFault, field_types, flag_name, tell
from megatron.nvidia_flags import NVIDIA_FLAGS, NvidiaFlag

if typing.TYPE_CHECKING:
    from megatron.checkpoint.config import CheckpointConfig
    from megatron.training.config import RunConfig

C = TypeVar("C", bound=Config)

# What other tools call a flag, where the nearest name would not lead to ours.
PLAIN_NAMES = {
    "--rope": "--position-embedding-type rope",
    "--learning-rate": "--lr",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--gradient-accumulation-steps": "--global-batch-size, which counts the samples of a whole step",
    "--epochs": "--train-iters or --train-samples",
    "--num-train-epochs": "--train-iters or --train-samples",
    "--max-steps": "--train-iters",
    "--max-iters": "--train-iters",
    "--steps": "--train-iters",
    "--warmup-steps": "--lr-warmup-iters",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--lr-scheduler-type": "--lr-decay-style",
    "--max-grad-norm": "--clip-grad",
    "--output-dir": "--save",
    "--out-dir": "--save",
    "--resume": "--load",
    "--resume-from-checkpoint": "--load",
    "--save-steps": "--save-interval",
    "--save-total-limit": "--keep-last",
    "--eval-steps": "--eval-interval",
    "--logging-steps": "--log-interval",
    "--dataset": "--data-path",
    "--tokenizer": "--tokenizer-type",
    "--dropout": "--hidden-dropout and --attention-dropout",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--gradient-checkpointing": "--recompute-granularity full",
    "--zero-stage": "--use-distributed-optimizer, which is ZeRO-1",
    "--block-size": "--seq-length",
    "--context-length": "--seq-length",
    "--n-layer": "--num-layers",
    "--n-head": "--num-attention-heads",
    "--n-embd": "--hidden-size",
    "--rmsnorm": "--normalization RMSNorm",
    "--fp32": "--bf16 or --fp16; without them all is fp32",
    "--dtype": "--bf16 or --fp16; without them all is fp32",
    "--precision": "--bf16 or --fp16; without them all is fp32",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that admits no abbreviations, raises `InputError`, and suggests the nearest flag."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        # Left to itself, argparse takes -1 for a value but -1e-4 and -inf for flags.
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        message = message.replace("argument -", "-", 1)
        raise InputError(message.replace("ignored explicit argument", "takes no value, but was given"))

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=", 1)[0]
            if not name.startswith("-"):
                raise InputError(f"{name!r} is not expected here; every value follows its flag")
            ours = [n for n, a in self._option_string_actions.items() if a.help != argparse.SUPPRESS]
            instead = PLAIN_NAMES.get(name.replace("_", "-"))
            near = difflib.get_close_matches(name, ours, n=1, cutoff=0.7)
            if instead is not None and re.match(r"--[\w-]+", instead).group() in ours:
                hint = f"use {instead}"
            else:
                hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
            raise InputError(f"{name} is not a flag of this command; {hint}")
        return namespace


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wide enough for long flag names; says what is required, and the default where there is one to state.

    The usage line holds only what argparse itself requires, not every flag once more.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def add_usage(self, usage, actions, groups, prefix=None) -> None:
        needed = [" ".join([*a.option_strings, a.metavar or a.dest.upper()]) for a in actions if a.required]
        super().add_usage(" ".join(["%(prog)s", *needed, "[flags]"]), actions, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.required and action.option_strings:
            return f"{text} (required)"
        shown = action.const is None and action.default not in (None, argparse.SUPPRESS)
        return text if not shown or "default" in text else f"{text} (default: %(default)s)"


def add_flags(
    parser: argparse.ArgumentParser,
    config: type[Config],
    title: str,
    defaults: Mapping[str, Any] | None = None,
    without: Container[str] = (),
) -> None:
    """Add the flags of a config dataclass as one `--help` group.

    A flag that is not given stays out of the namespace, so that a file of settings can supply it.

    Args:
        defaults: values, by field, that the command chooses in place of the dataclass's defaults.
        without: fields that the command has no flag for.
    """
    group = parser.add_argument_group(title, summary(config))
    scalar_types = field_types(config)
    for field in dataclasses.fields(config):
        if "flag" in field.metadata and field.name not in without:
            default = (defaults or {}).get(field.name, field.default)
            _add_flag(group, field, scalar_types[field.name], default)


def summary(config: type[Config]) -> str:
    """The first line of a config's docstring, which describes its group of flags."""
    return config.__doc__.splitlines()[0]


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field, scalar: type, default: Any) -> None:
    spec: Flag = field.metadata["flag"]
    names = (flag_name(field), *spec.aliases)
    common = {"dest": field.name, "default": argparse.SUPPRESS, "help": spec.help.replace("%", "%%")}
    if scalar is bool:
        group.add_argument(*names, action="store_const", const=not field.default, **common)
        return
    if spec.required and default is None:
        common["help"] += " (required)"
    elif default is not None and "default" not in spec.help:
        common["help"] += f" (default: {default})"
    if spec.choices is not None:
        metavar = "{" + ",".join(map(str, spec.choices)) + "}"
    else:
        metavar = spec.metavar or {int: "N", float: "X", str: "TEXT"}[scalar]
    convert = {int: _whole, float: _number, str: _text}[scalar]
    group.add_argument(*names, type=convert, nargs=spec.nargs, metavar=metavar, **common)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a value, or leave the flag out")
    return text


def make_config(config: type[C], values: dict[str, Any]) -> C:
    """Build `config` from the values that name its fields; others are left alone."""
    names = {f.name for f in dataclasses.fields(config)}
    return config(**{k: v for k, v in values.items() if k in names})


def parse_run_config(argv: Sequence[str], *, description: str, defaults: dict[str, Any]) -> RunConfig:
    """The configuration of a training run, from the command line and the file that `--config` names.

    Args:
        defaults: values, by field, that an entry point chooses where neither gives one.

    Raises:
        InputError: a flag, a value, or a combination of values is wrong.
    """
    return run_config(run_values(argv, run_parser(description, defaults), defaults))


def run_values(
    argv: Sequence[str],
    parser: Parser,
    defaults: dict[str, Any],
    *,
    model_of: Callable[[CheckpointConfig], str | None] = lambda config: None,
) -> dict[str, Any]:
    """The values of a training run's flags, by field: of the command line, the file that `--config` names, and
    `defaults`.

    Args:
        model_of: the folder whose checkpoint is asked as by --use-checkpoint-args, where that flag is not given.

    Raises:
        InputError: a flag or a value is wrong.
    """
    from megatron.checkpoint.config import CheckpointConfig

    namespace = argparse.Namespace(notices=[], refusals=[])
    # What the file says is parsed as if it stood before the command line, which so has the last word.
    config_file = _config_file(argv)
    if config_file is not None:
        try:
            _parse(parser, _read_settings(config_file, parser), namespace)
        except InputError as error:
            raise InputError(f"--config {config_file}: {error}") from None
    given = _parse(parser, argv, namespace)
    checkpoint = make_config(CheckpointConfig, given)
    folder = checkpoint.load if checkpoint.use_checkpoint_args else model_of(checkpoint)
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
    """What is told of flags that mean nothing beside the others, or without one that is not there."""
    from megatron.optim.config import LOSS_SCALING

    told = []
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        told.append("--sequence-parallel has no effect: --tensor-model-parallel-size is 1")
    if not values.get("fp16"):
        names = [f"--{name.replace('_', '-')}" for name in LOSS_SCALING if name in values]
        told += [f"{name} has no effect: only --fp16 needs its loss scaled" for name in names]
    if values.get("fp32_residual_connection") and not (values.get("fp16") or values.get("bf16")):
        told.append("--fp32-residual-connection has no effect: without --bf16 or --fp16 all is fp32")
    if values.get("log_timers_to_tensorboard") and not values.get("timing_log_level"):
        told.append(
            "--log-timers-to-tensorboard has no effect: without --timing-log-level there are no timers"
        )
    return told


def run_config(values: dict[str, Any]) -> RunConfig:
    """The configuration that these values of fields make up.

    Raises:
        InputError: a combination of values is wrong.
    """
    from megatron.training.config import RunConfig

    configs = typing.get_type_hints(RunConfig)
    data = make_config(configs["data"], values)
    data.require("seq_length")
    values = {"max_position_embeddings": data.seq_length} | values
    config = RunConfig(**{name: make_config(kind, values) for name, kind in configs.items()})
    _check_across(config)
    return config


def _parse(parser: Parser, words: Sequence[str], namespace: argparse.Namespace) -> dict[str, Any]:
    """The values that `words` add to `namespace`; an error of a line for each of NVIDIA's flags that is refused."""
    parser.parse_args(words, namespace)
    if namespace.refusals:
        raise InputError("\n".join(dict.fromkeys(namespace.refusals)))
    return vars(namespace)


def _with_checkpoint_args(given: dict[str, Any], config: CheckpointConfig) -> dict[str, Any]:
    """What was given, and what is taken of the checkpoint of --load: the architecture of its model, which has the last
    word; the model's other values, --seq-length and the tokenizer, where nothing else was given.

    A folder that may be empty still, being that of --save, adds nothing.
    """
    from megatron.checkpoint.checkpoint import is_architecture, model_config, saved_tokenizer
    from megatron.checkpoint.find import find_checkpoint
    from megatron.data.config import DataConfig

    save = None if config.finetune else config.save
    checkpoint = find_checkpoint(config.load, save, step=config.ckpt_step, verify=False)
    if checkpoint is None:
        return given
    model, tokenizer = model_config(checkpoint), saved_tokenizer(checkpoint)
    fixed = {name: value for name, value in vars(model).items() if is_architecture(name, model)}
    free = vars(model) | {"seq_length": checkpoint.state["config"].get("data", {}).get("seq_length")}
    if "seq_length" in given:
        del free["max_position_embeddings"]  # which is then as long
    if given.get("tokenizer_type", tokenizer.tokenizer_type) == tokenizer.tokenizer_type:
        free |= vars(tokenizer)
    taken = {name: value for name, value in free.items() if value is not None and name not in given} | fixed

    kinds = (type(model), DataConfig, type(tokenizer))
    fields = {field.name: field for kind in kinds for field in dataclasses.fields(kind)}
    shown = [
        _as_flag(f, taken[name]) for name, f in fields.items() if taken.get(name, f.default) != f.default
    ]
    wrong = [
        _as_flag(fields[name], given[name]) for name in fixed if given.get(name, fixed[name]) != fixed[name]
    ]
    instead = f", in place of {' '.join(wrong)}" if wrong else ""
    notice = f"--load: {checkpoint.folder} gives {' '.join(shown)}{instead}"
    return given | taken | {"notices": [*given["notices"], notice]}


def _as_flag(field: dataclasses.Field, value: Any) -> str:
    return flag_name(field) if isinstance(value, bool) else f"{flag_name(field)} {value}"


def run_parser(
    description: str,
    defaults: Mapping[str, Any],
    *,
    own: Mapping[str, type[Config]] | None = None,
    without: Container[str] = (),
) -> Parser:
    """The parser of a training run: a group of flags for each part of `RunConfig`, and NVIDIA's other flags.

    Args:
        own: further groups of the entry point, by title, which come first.
        without: fields of `RunConfig` that it has no use for.
    """
    from megatron.training.config import RunConfig

    parser = Parser(description=description)
    parser.add_argument("--version", action="version", version=f"megatron {__version__}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of flags, without their dashes in front; the value on the command line wins over it, "
        "but a switch that the file turns on stays on",
    )
    for name, kind in (own or {}).items():
        add_flags(parser, kind, name, defaults)
    for name, kind in typing.get_type_hints(RunConfig).items():
        add_flags(parser, kind, name.replace("_", " "), defaults, without)
    for nvidia in NVIDIA_FLAGS:
        if nvidia.name in parser._option_string_actions:  # of the entry point's own
            continue
        parser.add_argument(nvidia.name, action=_NvidiaAction, flag=nvidia, nargs=nvidia.nargs)
    return parser


class _NvidiaAction(argparse.Action):
    """A flag of NVIDIA's that has no meaning here: noted in one line, or refused in one."""

    def __init__(self, option_strings: list[str], dest: str, flag: NvidiaFlag, nargs: int | str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, help=argparse.SUPPRESS)
        self.flag = flag

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if values and values[0] in self.flag.harmless:
            return
        given = " ".join([self.flag.name, *values])
        if self.flag.refused:
            namespace.refusals.append(f"{given} is not supported: {self.flag.note}")
        else:
            namespace.notices.append(f"{given} has no effect: {self.flag.note}")


def _config_file(argv: Sequence[str]) -> Path | None:
    finder = Parser(add_help=False)
    finder.add_argument("--config", type=_text)
    found, _ = finder.parse_known_args(argv)
    return None if found.config is None else Path(found.config)


def _read_settings(path: Path, parser: Parser) -> list[str]:
    """The settings of a YAML file as the arguments they stand for."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        raise InputError(f"line {where.line + 1}: is not YAML" if where else "is not YAML") from None
    if not isinstance(settings, dict):
        raise InputError("must hold 'name: value' lines, the names those of flags")
    names = {name.replace("_", "-"): name for name in parser._option_string_actions}
    arguments: list[str] = []
    for key, value in settings.items():
        dashed = "--" + str(key).replace("_", "-")
        if dashed in ("--config", "--help", "--version"):
            raise InputError(f"{key}: belongs on the command line")
        name = names.get(dashed)
        # An unknown name is left to the parser, which suggests another.
        arguments += [dashed] if name is None else _setting(name, value, parser._option_string_actions[name])
    return arguments


def _setting(name: str, value: Any, action: argparse.Action) -> list[str]:
    """One setting of a file as the arguments it stands for; null means that it is not given."""
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{name}: {value!r} is not true or false")
        return [name] if value else []
    several = action.nargs not in (None, 1)
    values = value if several and isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, str | int | float) for v in values):
        raise InputError(f"{name}: {value!r} is not {'a list of values' if several else 'a single value'}")
    return [name, *map(str, values)] if several else [f"{name}={value}"]


def _check_across(config: RunConfig) -> None:
    """What spans two parts of the configuration."""
    training, optimizer = config.training, config.optimizer
    if config.data.seq_length > config.model.max_position_embeddings:
        raise InputError(
            f"--seq-length: {config.data.seq_length} is longer than --max-position-embeddings "
            f"{config.model.max_position_embeddings}"
        )
    if config.logging.profile and config.logging.tensorboard_dir is None and config.checkpoint.save is None:
        raise InputError("--profile needs --tensorboard-dir or --save, the folder that it writes to")
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


def end_on_sigterm() -> None:
    """From now on end a terminated command as an interrupted one, so that it tidies up; which a second signal does not
    disturb."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's `main` and exit: with what it returns (None for 0), with one line and the exception's status
    on wrong input (2) or a fault of training (1 or 200), with 130 on Ctrl-C."""
    try:
        code = main()
    except (InputError, TrainingFault) as error:
        tell(f"error: {error}")
        code = error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; what it asked for is done.
        sys.stderr.close()
        code = 0
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # All is closed and written by now. Threads of torch's communication that still run while the interpreter
        # is taken down abort a process now and then, which torchrun would take for a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)
