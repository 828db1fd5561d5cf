"""Convert a checkpoint between the native format, Hugging Face's and Megatron-LM's, and compare the logits of both.

megatron convert --from huggingface --to native --load gpt2 --save my/gpt2
megatron convert --from native --to huggingface --load my/run --save my/gpt2-hf
megatron convert --from megatron --to native --load nvidia/run --save my/run \
    --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
megatron convert --from native --to megatron --load my/run --save nvidia/run \
    --target-tensor-model-parallel-size 2
megatron convert --from megatron --to megatron --load nvidia/run --save nvidia/divided \
    --target-tensor-model-parallel-size 4 --target-pipeline-model-parallel-size 2
megatron convert --from native --to native --load my/dense --save my/mixture \
    --moe-use-upcycling --num-experts 8 --moe-router-topk 2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.cli import Parser, add_flags, run_command
from megatron.errors import InputError, TrainingFault
from megatron.inference.conversion import (
    TOLERANCE,
    compare_tokenizers,
    largest_difference,
    our_logits,
    their_logits,
)
from megatron.interop.convert import check_is_empty, parts_to_write, write_native
from megatron.interop.huggingface.expressible import with_scaled_experts, without_capacity
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.write import write_huggingface
from megatron.interop.nvidia.read import open_megatron
from megatron.interop.nvidia.write import write_megatron
from megatron.interop.upcycle import keeps_outputs, upcycled
from megatron.model.config import ModelConfig
from megatron.model.moe_config import MoEConfig
from megatron.settings.tokenizer import TokenizerFlags, tokenizer_config
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tool import exit_on_sigterm

FORMATS = ("native", "huggingface", "megatron")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    for name, dest in (("--from", "source"), ("--to", "target")):
        parser.add_argument(name, dest=dest, choices=FORMATS, required=True, help="format")
    parser.add_argument("--load", required=True, metavar="DIR", type=Path, help="folder to read")
    parser.add_argument(
        "--save", required=True, metavar="DIR", type=Path, help="folder to write, empty or new"
    )
    parser.add_argument(
        "--no-verify-checkpoint",
        action="store_true",
        help="do not compare the checksums of a native checkpoint's files before reading it",
    )
    parser.add_argument(
        "--moe-use-upcycling",
        action="store_true",
        help="copy the MLPs of a dense GPT to the experts of --num-experts; with the flags of experts and their router",
    )
    add_megatron_flags(parser)
    args = parser.parse_args(argv)
    same = args.source == args.target != "megatron"  # Megatron-LM's files can be converted to another layout
    if same and not args.moe_use_upcycling:
        raise InputError(f"--to: {args.target} is also the format of --from; there is nothing to convert")
    check_is_empty(args.save)
    args.save = args.save.resolve()  # a link itself cannot be replaced
    read, write = readers(args), writers(args)
    source = reference = read[args.source](args.load)
    folders = {args.source: args.load, args.target: args.save}
    if args.moe_use_upcycling:
        source = upcycled(reference, given_fields(args, MoEConfig))
        if not keeps_outputs(model_config(source)):
            reference, folders = source, {args.target: args.save}
    if args.target == "huggingface" and source.state["task"] == "GPT":
        plain = without_capacity(source)
        # The comparison checks the scaled weights, too.
        source, reference = with_scaled_experts(plain), plain if reference is source else reference
    print(f"{source.folder}: {source.state['task']}, iteration {source.iteration}")
    for note in source.notes:
        print(f"note: {note}")
    if args.target != "native" and "optimizer" in source.tensors:
        print("note: only the weights are written, not the optimizer state")
    elements = sum(math.prod(tensor["shape"]) for tensor in source.tensors["model"].index.values())
    print(f"{elements:,} parameters, vocabulary of {source.state['vocab_size']:,} ids")
    exit_on_sigterm()
    kinds = source.tensors if args.target == "native" else ["model"]
    size = sum(t.nbytes for kind in kinds for t in parts_to_write(source.tensors[kind])[0].values())
    # Without a terminal, print a line now and then.
    seconds = 0.1 if sys.stderr.isatty() else 30
    with tqdm(total=size, unit="B", unit_scale=True, mininterval=seconds) as progress:
        try:
            write[args.target](source, args.save, progress.update)
        except OSError as error:
            raise TrainingFault(f"--save: {args.save} cannot be written: {error}; nothing was kept") from None
    try:
        compare(reference, read[args.target](args.save), folders)
    except BaseException:
        shutil.rmtree(args.save)
        raise
    print(f"written to {args.save}")


def add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("--from megatron")
    source.add_argument("--no-load-optim", action="store_true", help="do not convert the optimizer state")
    add_flags(parser, TokenizerFlags, "tokenizer of the checkpoint, with --from megatron")
    add_flags(
        parser,
        ModelConfig,
        "model, with --from megatron if the files lack the flags of their run; experts, with --moe-use-upcycling",
    )
    target = parser.add_argument_group("--to megatron")
    for axis in ("tensor", "pipeline"):
        help = f"number of {axis}-parallel ranks to divide the model among (default: 1)"
        names = (
            f"--target-{axis}-model-parallel-size",
            f"--target-{axis}-parallel-size",  # as in Megatron-LM's own converter
        )
        target.add_argument(*names, type=int, metavar="N", help=help)


def readers(args: argparse.Namespace) -> dict[str, Callable]:
    """The function that opens a checkpoint, for each format."""
    tokenizer = tokenizer_config(vars(args))
    if tokenizer.tokenizer_type is None and tokenizer != TokenizerConfig(vocab_size=tokenizer.vocab_size):
        raise InputError(
            "--tokenizer is required with other tokenizer flags: the folder or file of the tokenizer"
        )
    model = given_fields(args, ModelConfig)
    if args.moe_use_upcycling:
        model = {name: value for name, value in model.items() if name not in given_fields(args, MoEConfig)}
    if args.source != "megatron" and (model or args.no_load_optim or tokenizer != TokenizerConfig()):
        raise InputError("--no-load-optim and the flags of tokenizer and model need --from megatron")
    megatron = functools.partial(
        open_megatron, tokenizer=tokenizer, given=model, load_optim=not args.no_load_optim
    )
    native = functools.partial(open_native, verify=not args.no_verify_checkpoint)
    return {"native": native, "huggingface": open_huggingface, "megatron": megatron}


def given_fields(args: argparse.Namespace, config: type[MoEConfig]) -> dict[str, Any]:
    """The fields of a config on the command line."""
    fields = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(args).items() if name in fields}


def writers(args: argparse.Namespace) -> dict[str, Callable]:
    """The function that writes a checkpoint, for each format."""
    sizes = {
        "tensor": args.target_tensor_model_parallel_size,
        "pipeline": args.target_pipeline_model_parallel_size,
    }
    for axis, size in sizes.items():
        flag = f"--target-{axis}-model-parallel-size"
        if size is not None and args.target != "megatron":
            raise InputError(f"{flag}: {size} needs --to megatron; other formats do not depend on the layout")
        if size is not None and size < 1:
            raise InputError(f"{flag}: {size} is too small; it must be at least 1")
    megatron = functools.partial(
        write_megatron, tensor_parallel=sizes["tensor"] or 1, pipeline_parallel=sizes["pipeline"] or 1
    )
    return {"native": write_native, "huggingface": write_huggingface, "megatron": megatron}


def compare(source: Checkpoint, result: Checkpoint, folders: dict[str, Path]) -> None:
    """Compare logits and token ids of source and result, and print what was compared with what.

    Raises:
        TrainingFault: logits differ by more than rounding.
    """
    expected = our_logits(source)
    name = "the written checkpoint (read back by this program)"
    differences = {name: largest_difference(expected, our_logits(result))}
    folder = folders.get("huggingface")
    lines = []
    if folder is None:
        lines.append("nothing was compared with another implementation")
    else:
        try:
            differences[f"transformers from {folder}"] = largest_difference(
                expected, their_logits(folder, source)
            )
            saved = saved_tokenizer(source)
            if saved.tokenizer_type not in (None, "NullTokenizer"):
                lines.append(compare_tokenizers(folder, build_tokenizer(saved)))
        except ImportError as error:
            lines.append(f"warning: nothing was compared with transformers: {error}")
    for name, difference in differences.items():
        same = "are the same" if difference == 0 else f"differ by {difference:.2e} of the largest"
        print(f"logits of {name} {same}")
    for line in lines:
        print(line)
    # NaN also fails this comparison.
    wrong = [name for name, difference in differences.items() if not difference <= TOLERANCE]
    if wrong:
        raise TrainingFault(
            f"logits of {wrong[0]} differ from those of {source.folder} by more than {TOLERANCE:g} of the "
            "largest; nothing was kept"
        )


def open_native(folder: Path, *, verify: bool = True) -> Checkpoint:
    found = find_checkpoint(str(folder), None, verify=verify)
    assert found is not None  # only a folder that is also --save may be empty
    if found.manifest is None:
        raise InputError(f"--load: {folder} is a Hugging Face model; give --from huggingface")
    return found


if __name__ == "__main__":
    run_command(main)
