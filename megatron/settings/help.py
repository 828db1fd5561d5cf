"""The help of a training run, in parts: the flags that matter first, the flags of a group, or all (--help [GROUP])."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron.cli import HelpFormatter, Parser, summary
from megatron.errors import InputError
from megatron.flags import Config
from megatron.model.latent_attention import LatentAttentionConfig
from megatron.model.moe_config import MoEConfig
from megatron.training.config import RunConfig

# Flags that most runs give, in the order in which one decides on them.
FIRST = """
    --config --num-layers --hidden-size --num-attention-heads --seq-length
    --data-path --tokenizer --train-iters --train-tokens --train-epochs
    --micro-batch-size --global-batch-size
    --lr --min-lr --lr-decay-style --lr-warmup-fraction --bf16
    --tensor-model-parallel-size --pipeline-model-parallel-size --use-distributed-optimizer
    --save --save-interval --load --log-interval --eval-interval
""".split()
ALL = "all"
# Groups of flags that belong to other groups too: a config, and the first words of further flags.
TOPICS: dict[str, tuple[type[Config], tuple[str, ...]]] = {
    "moe": (MoEConfig, ("--moe-", "--expert-")),
    "latent-attention": (LatentAttentionConfig, ()),
}


def add_help(parser: Parser) -> None:
    """Add --help [GROUP] to the parser of a training run."""
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs="?",
        metavar="GROUP",
        default=argparse.SUPPRESS,
        help="show the flags that matter first, those of GROUP, or 'all', and exit",
    )


class _Help(argparse.Action):
    """Print help and exit."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        print(help_text(parser, value), end="")
        parser.exit()


def help_text(parser: Parser, group: str | None = None) -> str:
    """The help of a training run: the first flags and the names of the groups, the flags of `group`, or all flags.

    Raises:
        InputError: there is no such group.
    """
    if group == ALL:
        return parser.format_help()
    groups = {_dashed(g.title): g for g in parser._action_groups if g.description}
    groups |= {name: _topic(parser, name) for name in TOPICS}
    formatter = HelpFormatter(parser.prog)
    formatter.add_usage(None, parser._actions, parser._mutually_exclusive_groups)
    if group is not None:
        if _dashed(group) not in groups:
            raise InputError(
                f"--help: {group} is not a group of flags; choose {ALL} or one of {', '.join(groups)}"
            )
        _add_section(formatter, groups[_dashed(group)])
        return formatter.format_help()
    formatter.add_text(parser.description)
    # Groups that only this entry point has are shown whole.
    ours = {_dashed(name) for name in RunConfig.section_types()} | TOPICS.keys()
    for name in [name for name in groups if name not in ours]:
        _add_section(formatter, groups[name])
    formatter.start_section("flags that matter first")
    formatter.add_arguments([parser.flags[name] for name in FIRST if name in parser.flags])
    formatter.end_section()
    formatter.start_section("groups of flags")
    width = max(map(len, groups))
    formatter.add_text("\n".join(f"{name:{width}}  {g.description}" for name, g in groups.items()))
    formatter.end_section()
    formatter.add_text(f"--help GROUP lists the flags of a group, --help {ALL} lists all flags.")
    return formatter.format_help()


def _topic(parser: Parser, name: str) -> argparse._ArgumentGroup:
    """A group of `TOPICS`, which is not one of the parser's."""
    config, words = TOPICS[name]
    fields = {field.name for field in dataclasses.fields(config)}
    group = argparse._ArgumentGroup(parser, name, summary(config))
    actions = dict.fromkeys(parser.flags.values())
    group._group_actions += [a for a in actions if a.dest in fields or a.option_strings[0].startswith(words)]
    return group


def _add_section(formatter: HelpFormatter, group: argparse._ArgumentGroup) -> None:
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(group._group_actions)
    formatter.end_section()


def _dashed(title: str | None) -> str:
    """The name of a group of flags as a word of the command line."""
    return (title or "").replace(" ", "-").replace("_", "-")
