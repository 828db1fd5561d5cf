"""--help of a training run, in parts and as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.arguments import run_parser
from megatron.cli import Parser
from megatron.errors import InputError
from megatron.finetuning.finetune import FinetuneConfig
from megatron.settings.help import FIRST, help_text
from megatron.training.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent.parent


def flags_in(text: str) -> set[str]:
    """The flags that a help text describes."""
    lines = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  -")]
    return {word.rstrip(",") for line in lines for word in line.split() if word.startswith("--")}


@pytest.fixture
def parser() -> Parser:
    return run_parser("Pretrain.", {})


def test_help_shows_the_first_flags_and_the_groups(parser: Parser) -> None:
    text = help_text(parser)
    assert len(FIRST) == len(set(FIRST)) == 25
    assert {*FIRST} <= flags_in(text) and len(flags_in(text)) <= len(FIRST) + 3  # aliases
    for group in ("training", "loss-scale", "dry-run"):
        assert f"\n  {group} " in text
    assert text.startswith("usage: ") and "\n\nPretrain.\n\n" in text
    # The descriptions of the groups form a column.
    table = text.split("\ngroups of flags:\n")[1].split("\n\n")[0].splitlines()
    columns = {len(line) - len(line.lstrip().partition(" ")[2].lstrip()) for line in table}
    assert len(table) > 10 and len(columns) == 1
    assert text.endswith("--help GROUP lists the flags of a group, --help all lists all flags.\n")


def test_help_all_is_complete(parser: Parser) -> None:
    hidden = {name for name, action in parser.flags.items() if action.help == "==SUPPRESS=="}
    assert flags_in(help_text(parser, "all")) == {n for n in parser.flags if n.startswith("--")} - hidden


@pytest.mark.parametrize("group", ["loss scale", "loss-scale", "loss_scale"])
def test_help_of_a_group(parser: Parser, group: str) -> None:
    text = help_text(parser, group)
    expected = {
        "--loss-scale",
        "--initial-loss-scale",
        "--min-loss-scale",
        "--loss-scale-window",
        "--hysteresis",
    }
    assert flags_in(text) == expected


def test_help_of_topics(parser: Parser) -> None:
    found = flags_in(help_text(parser, "moe"))
    assert {"--num-experts", "--moe-router-topk", "--add-expert-bias", "--moe-per-layer-logging"} <= found
    assert "--expert-model-parallel-size" in found and "--num-layers" not in found
    text = help_text(parser, "latent-attention")
    assert "--kv-lora-rank" in flags_in(text) and "They need --multi-latent-attention." in text


def test_groups_together_have_all_flags(parser: Parser) -> None:
    found = set().union(*(flags_in(help_text(parser, name)) for name in RunConfig.section_types()))
    assert flags_in(help_text(parser, "all")) - found == {"--help", "--version", "--config"}


def test_an_unknown_group_is_an_error(parser: Parser) -> None:
    with pytest.raises(
        InputError, match=r"^--help: optimiser is not a group of flags; choose all or one of train"
    ) as e:
        parser.parse_args(["--help", "optimiser"])
    assert "optimizer, " in str(e.value) and "\n" not in str(e.value)


def test_an_entry_points_own_groups_are_shown_whole() -> None:
    parser = run_parser("Fine-tune.", {}, own={"fine-tuning": FinetuneConfig}, without=["train_iters"])
    found = flags_in(help_text(parser))
    assert {"--epochs", "--train-data", "--lr"} <= found and "--train-iters" not in found


@pytest.mark.parametrize(
    "module",
    [
        "megatron.pretrain_gpt",
        "megatron.pretrain_bert",
        *(
            f"megatron.commands.{name}"
            for name in (
                "make_corpus",
                "train_tokenizer",
                "preprocess_data",
                "merge_datasets",
                "inspect_data",
            )
        ),
    ],
)
def test_help_does_not_import_torch(module: str) -> None:
    code = (
        f"import sys; sys.argv = ['command', '--help']\nfrom {module} import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: command ")


def test_orders_of_plug_ins_are_choices_before_torch_is_imported() -> None:
    code = "from megatron.arguments import run_parser; from megatron import plugin_flags; import sys\n"
    code += "from megatron.settings.help import help_text\n"
    code += "print(help_text(run_parser('', {}), 'data')); assert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "--dataloader-type {single,cyclic}" in out
