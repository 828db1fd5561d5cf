"""The command `megatron`: a subcommand for every entry point and tool.

megatron COMMAND [flags]            megatron COMMAND --help lists the flags of a command
torchrun -m megatron COMMAND ...    in several processes
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version

from megatron import __version__
from megatron.cli import run_command
from megatron.errors import InputError

# Module of each command, and what it does. Only the module of the chosen command is imported.
COMMANDS = {
    "pretrain-gpt": ("megatron.pretrain_gpt", "pretrain a GPT"),
    "pretrain-bert": ("megatron.pretrain_bert", "pretrain a BERT"),
    "finetune-bert": ("megatron.commands.finetune_bert", "fine-tune a BERT on labeled texts"),
    "train-tokenizer": ("megatron.commands.train_tokenizer", "train a tokenizer on text"),
    "preprocess": ("megatron.commands.preprocess_data", "turn text into token files"),
    "merge": ("megatron.commands.merge_datasets", "merge token files"),
    "inspect-data": ("megatron.commands.inspect_data", "check token files and print documents"),
    "generate": ("megatron.commands.generate_text", "generate text from prompts"),
    "serve": ("megatron.commands.serve", "serve a model over HTTP, with OpenAI's interface"),
    "evaluate": ("megatron.commands.evaluate", "measure perplexity or LAMBADA accuracy"),
    "report": ("megatron.commands.report", "draw runs as an HTML page"),
    "inspect-checkpoint": ("megatron.commands.inspect_checkpoint", "list, verify and compare checkpoints"),
    "convert": ("megatron.commands.convert_checkpoint", "convert from and to Hugging Face and Megatron-LM"),
    "plan": ("megatron.commands.plan", "find the fastest layout of a model on a cluster"),
    "verify": ("megatron.commands.verify", "check that a layout trains the same model as one process"),
    "make-corpus": ("megatron.commands.make_corpus", "make a small corpus from Python's own texts"),
}


def main() -> int | None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(versions())
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise InputError(f"{name} is not a command; choose from {', '.join(COMMANDS)}")
    # The name that argparse shows in the command's help.
    sys.argv = [f"megatron {name}", *rest]
    module, _ = COMMANDS[name]
    return importlib.import_module(module).main()


def usage() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return f"{__doc__}\ncommands:\n{listed}\n\nmegatron --version prints the version."


def versions() -> str:
    """The version, and a note if NVIDIA's package shares the name with this one."""
    line = f"megatron {__version__}"
    try:
        core = version("megatron-core")
    except PackageNotFoundError:
        return line
    return (
        f"{line}\nnote: megatron-core {core} is installed too. Both packages are named megatron, and from a checkout "
        "of this project `import megatron.core` fails. Use separate environments."
    )


def run() -> None:
    """The installed command `megatron`."""
    run_command(main)


if __name__ == "__main__":
    run()
