r"""Plan the training of a GPT: which layouts fit a cluster, how fast each will be, and the command that starts the
best.

    python tools/plan.py --model 1t --gpus 3072 --gpu a100-80gb --tokens 450e9
    python tools/plan.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --cluster mine.yaml \
        --global-batch-size 512 --seq-length 4096
    python tools/plan.py --calibrate here.yaml

docs/scaling.md says what the prediction knows, and how it compares with published runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from megatron.arguments import Parser, add_flags, make_config, run_command
from megatron.flags import Config, InputError, field_types, flag
from megatron.model.config import ModelConfig
from megatron.planner.cluster import DATA_SHEET_REACHED, Cluster, of_data_sheet
from megatron.planner.description import read_cluster
from megatron.planner.devices import data_sheet
from megatron.planner.explain import other_choices, takeaways, why_not
from megatron.planner.layout import OURS, Job
from megatron.planner.models import MODELS, VOCAB_SIZE
from megatron.planner.report import (
    command,
    command_flags,
    details,
    dry_run_command,
    duration,
    heading,
    table,
    tflops,
)
from megatron.planner.search import Found, search
from megatron.planner.simulate import Simulator
from megatron.planner.trace import write_picture, write_trace

BEST = 10  # plans that are shown
A100_80GB = "a100-80gb"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """What to train, on what, and what to write."""

    model: str | None = flag(
        None, "a model of the papers' tables, in place of the model's own flags", choices=tuple(MODELS)
    )
    gpus: int | None = flag(
        None, "number of GPUs (default: those of the model's row in the papers' tables)", low=1, high=10**6
    )
    gpu: str | None = flag(
        None,
        f"which, in NVIDIA's machines for it (default: {A100_80GB}); one that is not known is answered by the list",
        metavar="NAME",
    )
    cluster: str | None = flag(
        None, "YAML description of a cluster, in place of --gpus and --gpu (docs/scaling.md)", metavar="FILE"
    )
    global_batch_size: int | None = flag(
        None, "samples in a step (default: those of the model's row)", low=1, high=10**7
    )
    seq_length: int | None = flag(None, "tokens in a sample (default: those of the model's row)", low=1)
    vocab_size: int = flag(VOCAB_SIZE, "tokens of the vocabulary, before padding", low=1)
    tokens: float | None = flag(
        None, "tokens to train on, such as 300e9: tells days and GPU-hours", above=0, high=1e18
    )
    explain: bool = flag(False, "apply the takeaways of arXiv 2104.04473 to this case")
    json: str | None = flag(None, "write the plans and what is predicted of each", metavar="FILE")
    trace: str | None = flag(
        None,
        "write the best plan's timeline, for https://ui.perfetto.dev or chrome://tracing",
        metavar="FILE",
    )
    picture: str | None = flag(
        None, "draw the best plan's schedule, as .svg or .png by its ending", metavar="FILE"
    )
    calibrate: str | None = flag(
        None,
        "measure this machine's CPU for a minute or two and write it as a file for --cluster; plans nothing",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.picture is not None and Path(self.picture).suffix not in (".svg", ".png"):
            raise InputError(f"--picture: {self.picture} must end in .svg or .png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, PlanConfig, "plan")
    named = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads"), "that of --model")
    add_flags(parser, ModelConfig, "model", named)
    args = vars(parser.parse_args(argv))
    config = make_config(PlanConfig, args)
    if config.calibrate is not None:
        from megatron.planner.calibrate import calibrate

        calibrate(Path(config.calibrate))
        return
    check_files(config)
    job, cluster = make_job(config, args), make_cluster(config)
    with tqdm(desc="layouts", unit="", leave=False, disable=not sys.stderr.isatty()) as bar:
        found = search(job, cluster, wanted=BEST, progress=lambda n: bar.update(n - bar.n))
    best = found.plans[0]
    print(f"{config.model or 'model'}: {heading(job, cluster)}")
    print(f"{found.timed:,} layouts fit and were timed; {found.too_large:,} do not fit\n")
    print(table(found, job, cluster))
    print(f"\nThe best: {best.layout}\n{details(best, cluster)}")
    if cluster.reached == DATA_SHEET_REACHED:
        print(
            "  note    this program has not been measured on GPUs: what is reached of a data sheet is that of A100 runs"
        )
    if config.tokens is not None:
        print(duration(best, job, cluster, config.tokens))
    print("\nOther choices, one at a time:")
    for words, other in other_choices(best, job, cluster):
        print(f"  {words:<26}{why_not(other, best, job, cluster)}")
    if config.explain:
        print("", *takeaways(best, job, cluster), sep="\n")
    flags = command_flags(best, job, cluster, config.tokens)
    print(
        f"\nTo start it, with the flags of data, tokenizer, optimizer and checkpoints:\n\n{command(flags, cluster)}"
        f"\n\nTo count on this machine what it needs (docs/dry-run.md):\n\n{dry_run_command(flags, job, cluster)}"
    )
    write_files(config, found, job, cluster)


def make_job(config: PlanConfig, args: dict[str, Any]) -> Job:
    """What is trained: a named model, with whatever flags say otherwise.

    Raises:
        InputError: neither names a model; a size of it is missing; or its samples are longer than its positions.
    """
    known: dict[str, Any] = {}
    seq_length, batch = config.seq_length, config.global_batch_size
    if config.model is not None:
        named = MODELS[config.model]
        known = {"num_layers": named.layers, "hidden_size": named.hidden, "num_attention_heads": named.heads}
        seq_length, batch = seq_length or named.seq_length, batch or named.global_batch_size
    elif "num_layers" not in args:
        raise InputError("--model or --num-layers is required: what is to be trained")
    for name, value in (("--seq-length", seq_length), ("--global-batch-size", batch)):
        if value is None:
            raise InputError(f"{name} is required for a model that is given by its own flags")
    sizes = {"max_position_embeddings": seq_length, **known}
    model = make_config(ModelConfig, sizes | {k: v for k, v in args.items() if k in field_types(ModelConfig)})
    if seq_length > model.max_position_embeddings:
        raise InputError(
            f"--seq-length: {seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}"
        )
    return Job(model, seq_length, config.vocab_size, batch)


def make_cluster(config: PlanConfig) -> Cluster:
    """What it is trained on.

    Raises:
        InputError: nothing says how many devices; the GPU is not known; the file is wrong.
    """
    if config.cluster is not None:
        for name, value in (("--gpus", config.gpus), ("--gpu", config.gpu)):
            if value is not None:
                raise InputError(
                    f"{name}: the file of --cluster says which devices there are; leave one of the two out"
                )
        return read_cluster(Path(config.cluster))
    gpus = config.gpus or (MODELS[config.model].gpus if config.model else None)
    if gpus is None:
        raise InputError("--gpus or --cluster is required for a model that is given by its own flags")
    return of_data_sheet(data_sheet(config.gpu or A100_80GB, where="--gpu"), gpus)


def check_files(config: PlanConfig) -> None:
    """See that what is asked for can be written, before there is anything to write.

    Raises:
        InputError: it cannot.
    """
    for name in ("json", "trace", "picture"):
        if (value := getattr(config, name)) is not None:
            path = Path(value)
            if path.is_dir() or not path.parent.is_dir():
                fault = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
                raise InputError(f"--{name}: {path} cannot be written: {fault}")
            if name == "picture" and path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
                raise InputError(
                    f"--picture: {path} needs matplotlib for PNG: pip install matplotlib; or end it in .svg"
                )


def write_files(config: PlanConfig, found: Found, job: Job, cluster: Cluster) -> None:
    """What --json, --trace and --picture ask for.

    Raises:
        InputError: a file cannot be written.
    """
    simulator = Simulator(job, found.plans[0].layout, cluster, OURS)
    if config.json is not None:
        plans = [
            {
                **dataclasses.asdict(plan),
                "tflops": tflops(plan, job, cluster),
                "command": command(command_flags(plan, job, cluster, config.tokens), cluster),
            }
            for plan in found.plans
        ]
        told = {
            "devices": cluster.devices,
            "timed": found.timed,
            "too large": found.too_large,
            "plans": plans,
        }
        try:
            Path(config.json).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--json: {config.json} cannot be written ({error.strerror})") from None
    if config.trace is not None:
        write_trace(simulator, Path(config.trace))
    if config.picture is not None:
        write_picture(simulator, Path(config.picture))


if __name__ == "__main__":
    run_command(main)
