r"""Evaluate a trained GPT: perplexity on WikiText or any text, or accuracy on LAMBADA.

    megatron evaluate --load my/run --task WIKITEXT103 --valid-data wiki.test.tokens --overlapping-eval 32
    megatron evaluate --load my/run --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada

`torchrun -m megatron evaluate` starts several processes. Those beyond --tensor-model-parallel-size times
--context-parallel-size times --pipeline-model-parallel-size form further replicas of the model, among which the samples
are divided.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron import __version__
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.evaluation.config import ZeroShotConfig, ZeroShotModelConfig
from megatron.evaluation.tasks import ZeroShotTask, make_task, read_file
from megatron.evaluation.zero_shot import by_context, evaluate
from megatron.inference.load import build_gpt, find_any_checkpoint
from megatron.inference.stages import Stages
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.settings.tokenizer import TokenizerFlags, tokenizer_config
from megatron.tool import check_output_file, write_output_file


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, ZeroShotConfig, "task")
    add_flags(parser, ZeroShotModelConfig, "model")
    add_flags(parser, TokenizerFlags, "tokenizer (default: the one saved with the checkpoint)")
    parser.add_argument("--output-path", type=Path, metavar="FILE", help="JSON file to write")
    args = vars(parser.parse_args(argv))
    config, chosen = make_config(ZeroShotConfig, args), tokenizer_config(args)
    inference, output = make_config(ZeroShotModelConfig, args), args["output_path"]
    check_output_file("--output-path", output)
    files = [read_file(path, "--valid-data") for path in config.valid_data]

    with init_mesh(inference.parallel, choose_device(inference.device)) as mesh:
        checkpoint = find_any_checkpoint(inference, chosen, mesh)
        # With the padding of the vocabulary as in training, so that perplexities equal those of validation.
        model, tokenizer = build_gpt(checkpoint, inference, chosen, mesh, as_trained=True)
        with raise_on_all_ranks(mesh.world, InputError):
            length = seq_length(config, model, mesh.cp.size)
            task = make_task(config.task, files, tokenizer, config, length=length)
        for note in task.notes if mesh.is_first else ():
            print(f"note: {note}", file=sys.stderr)
        stages = Stages([model], mesh)
        sums = (
            torch.zeros(2, task.length, dtype=torch.float64, device=mesh.device)
            if config.by_context
            else None
        )
        results = task.results(run(stages, task, config.micro_batch_size, sums))
        if not mesh.is_first:
            return
        line = task.line(results)
        print("-" * len(line), line, "-" * len(line), sep="\n")
        ranges = [] if sums is None else by_context(sums)
        for part in ranges:
            if part.first == part.last:
                tokens = f"{part.first:>23,} token{'s' * (part.first > 1)}"
            else:
                tokens = f"{part.first:>9,} to {part.last:>9,} tokens"
            print(f"{tokens} of context: loss {part.loss:.4f} ({part.tokens:,} tokens)")
        if output is not None:
            record = {
                "task": task.name,
                # JSON has neither NaN nor infinity; both become null.
                "results": {name: x if math.isfinite(x) else None for name, x in results.items()},
                **({"by context": [dataclasses.asdict(part) for part in ranges]} if ranges else {}),
                "samples": len(task.samples),
                "scored tokens": sum(sample.scored for sample in task.samples),
                "checkpoint": str(checkpoint.folder.absolute()),
                "iteration": checkpoint.iteration,
                "data": [file.identity() for file in files],
                "flags": flags_of(config, inference, chosen),
                "computed": computed_by(stages, task, config),
            }
            write_output_file("--output-path", output, json.dumps(record, indent=2) + "\n")


def run(stages: Stages, task: ZeroShotTask, micro_batch_size: int, by_position: torch.Tensor | None) -> float:
    """Sum the scores of all samples; rank 0 shows a progress bar. `by_position` is as for `evaluate`."""
    steps = math.ceil(len(task.samples) / (micro_batch_size * stages.mesh.dp.size))
    # Without a terminal, print a line now and then.
    seconds = 0.1 if sys.stderr.isatty() else 30
    hidden = not stages.mesh.is_first
    with tqdm(total=steps, desc=task.name, unit="batch", mininterval=seconds, disable=hidden) as progress:
        return evaluate(
            stages,
            task,
            micro_batch_size=micro_batch_size,
            advance=progress.update,
            by_position=by_position,
        )


def seq_length(config: ZeroShotConfig, model: GPTModel, ranks: int) -> int:
    """The length of the model's input, which `ranks` divide.

    Raises:
        InputError: it is longer than the model's position embeddings, or the ranks cannot divide it.
    """
    longest = model.config.max_position_embeddings
    learned = model.config.position_embedding_type == "learned_absolute"
    if config.seq_length is not None and config.seq_length > longest and learned:
        raise InputError(f"--seq-length: {config.seq_length} is longer than the model's context of {longest}")
    length = config.seq_length or longest
    if ranks > 1 and length % (2 * ranks):
        raise InputError(
            f"--seq-length: {length} is not a multiple of {2 * ranks}, twice --context-parallel-size; use "
            f"{max(length // (2 * ranks), 1) * 2 * ranks}"
        )
    return length


def computed_by(stages: Stages, task: ZeroShotTask, config: ZeroShotConfig) -> dict[str, Any]:
    """The facts besides flags on which the results may depend: resolved defaults, device, versions."""
    return {
        "seq_length": task.length,
        "overlapping_eval": None if task.greedy else config.stride(task.length),
        "device": stages.mesh.device.type,
        "dtype": str(stages.dtype).removeprefix("torch."),
        "processes": stages.mesh.world.size,
        "megatron": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def flags_of(*configs: Any) -> dict[str, Any]:
    """The values of all flags, by field."""
    return {name: value for config in configs for name, value in dataclasses.asdict(config).items()}


if __name__ == "__main__":
    run_command(main)
