r"""Plan the training of a GPT: the layouts that fit a cluster, their predicted speed, and the command of the best.

    megatron plan --model 1t --gpus 3072 --gpu a100-80gb --tokens 450e9
    megatron plan --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --cluster mine.yaml \
        --global-batch-size 512 --seq-length 4096
    megatron plan --gpu h100 --gpus 1024 -- pretrain_gpt.py --tensor-model-parallel-size 8 ...
    megatron plan --calibrate here.yaml

After -- a training command, or its flags alone: its layout is predicted instead of the best one.

docs/scaling.md describes the model behind the prediction and compares it with published runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, field_types, flag
from megatron.model.config import ModelConfig
from megatron.performance.config import FP8_FORMATS
from megatron.planner.budget import Failures, expenses, two_digits
from megatron.planner.cluster import Cluster, Device, cluster_from_data_sheet
from megatron.planner.description import read_cluster
from megatron.planner.device_specs import data_sheet
from megatron.planner.explain import other_choices, takeaways, why_not
from megatron.planner.layout import Job
from megatron.planner.memory import fits
from megatron.planner.models import VOCAB_SIZE, Published
from megatron.planner.picture import write_picture
from megatron.planner.presets import find_preset
from megatron.planner.profiles import find_constants, generation, with_constants
from megatron.planner.programs import OURS
from megatron.planner.questions import fewest_gpus, longest_of_all
from megatron.planner.report import (
    command,
    command_flags,
    details,
    dry_run_command,
    heading,
    limits,
    table,
    tflops,
    what_if,
)
from megatron.planner.search import Plan, SearchResult, make_plan, search, with_faster_divisions
from megatron.planner.simulate import Simulator
from megatron.planner.trace import trace_events
from megatron.tool import check_output_file, write_output_file

NUM_PLANS = 10  # shown
A100_80GB = "a100-80gb"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """The model, the cluster and the files to write."""

    model: str | None = flag(
        None,
        "a published model, such as llama3-8b, instead of flags of its shape; an unknown name prints close ones",
        metavar="NAME",
    )
    gpus: int | None = flag(None, "number of GPUs (default: that of --model)", low=1, high=10**6)
    gpu: str | None = flag(
        None,
        f"type of GPU, in the standard nodes or racks for it (default: {A100_80GB}); an unknown name prints the list",
        metavar="NAME",
    )
    cluster: str | None = flag(
        None, "YAML description of a cluster, instead of --gpus and --gpu (docs/scaling.md)", metavar="FILE"
    )
    global_batch_size: int | None = flag(
        None, "samples per step (default: that of --model)", low=1, high=10**7
    )
    seq_length: int | None = flag(None, "tokens per sample (default: that of --model)", low=1)
    fp8_format: str | None = flag(
        None, "plan a run with this flag: FP8 products in the layers", choices=FP8_FORMATS
    )
    vocab_size: int | None = flag(
        None, f"size of the vocabulary, before padding (default: that of --model, or {VOCAB_SIZE})", low=1
    )
    tokens: float | None = flag(
        None, "tokens to train on, such as 300e9; prints days and GPU-hours", above=0, high=1e18
    )
    days: float | None = flag(
        None,
        "with --tokens, instead of --gpus: plan for the fewest GPUs that train within so many days",
        above=0,
        high=10**5,
    )
    gpu_hour_price: float | None = flag(
        None, "with --tokens: dollars for an hour of one GPU; prints the cost", above=0, high=10**4
    )
    gpu_watts: float | None = flag(
        None,
        "with --tokens: power of one GPU with its share of the machine; prints the energy",
        above=0,
        high=10**5,
    )
    gpu_hours_between_failures: float | None = flag(
        None,
        "mean time between failures of one GPU with its share of the machine, such as 50000; prints the best interval "
        "between checkpoints and the share of the time that is left for training",
        above=0,
        high=10**9,
    )
    checkpoint_seconds: float = flag(
        60.0, "seconds for which a checkpoint stops training", above=0, high=10**5
    )
    restart_minutes: float = flag(
        10.0, "minutes from a failure until training goes on from the last checkpoint", above=0, high=10**5
    )
    longest_seq_length: bool = flag(
        False, "also print the longest sample that fits the cluster in any layout"
    )
    what_if: bool = flag(
        False, "also print what a network twice as fast, twice the memory and so on would bring"
    )
    explain: bool = flag(False, "explain the plan with the takeaways of arXiv 2104.04473")
    json: str | None = flag(None, "write the plans and their predictions", metavar="FILE")
    trace: str | None = flag(
        None,
        "write the predicted step of the best or the given layout, for https://ui.perfetto.dev: computation, "
        "communication and memory of each stage",
        metavar="FILE",
    )
    picture: str | None = flag(None, "draw the best plan's schedule as .svg or .png", metavar="FILE")
    calibrate: str | None = flag(
        None,
        "measure this machine's GPUs or CPU for a minute or two, write a file for --cluster, and exit; under torchrun "
        "also the network between machines",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gpu_hour_price", "gpu_watts", "days"):
            if getattr(self, name) is not None and self.tokens is None:
                raise InputError(f"--{name.replace('_', '-')} needs --tokens")
        if self.days is not None and (self.gpus is not None or self.cluster is not None):
            raise InputError("--days: finds the number of GPUs; leave out --gpus and --cluster, or --days")
        if self.picture is not None and Path(self.picture).suffix not in (".svg", ".png"):
            raise InputError(f"--picture: {self.picture} must end with .svg or .png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, PlanConfig, "plan")
    named = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads"), "that of --model")
    add_flags(parser, ModelConfig, "model", named)
    line = list(sys.argv[1:] if argv is None else argv)
    given = line.index("--") if "--" in line else len(line)
    args = vars(parser.parse_args(line[:given]))
    config = make_config(PlanConfig, args)
    if config.calibrate is not None:
        from megatron.planner.calibrate import calibrate

        calibrate(Path(config.calibrate))
        return
    check_files(config)
    if given < len(line):
        plan_given(config, args, line[given + 1 :])
        return
    job = make_job(config, args)
    if config.days is not None:
        cluster = cluster_for_days(config, job)
    else:
        cluster = make_cluster(config)
    check_precision(job.fp8_format, cluster.device)
    with tqdm(desc="layouts", unit="", leave=False, disable=not sys.stderr.isatty()) as bar:
        result = search(job, cluster, num_plans=NUM_PLANS, progress=lambda n: bar.update(n - bar.n))
    result = with_faster_divisions(result, job, cluster)
    best = result.plans[0]
    name = find_preset(config.model)[0] if config.model else "model"
    print(f"{name}: {heading(job, cluster)}")
    print(
        f"{result.layouts:,} layouts divide them: {result.timed:,} were simulated, {result.too_large:,} do not fit, "
        "and the others are slower than those below\n"
    )
    print(table(result, job, cluster))
    print(f"\nThe best: {best.layout}\n{details(best, cluster)}")
    print_notes(config, best, job, cluster)
    if config.longest_seq_length:
        length, layout = longest_of_all(job, cluster)
        print(f"  longest sample that fits the cluster: {length:,} tokens, in {layout}")
    print_changes(config, best, job, cluster)
    if config.explain:
        print("", *takeaways(best, job, cluster), sep="\n")
    flags = command_flags(best, job, cluster, config.tokens)
    print(
        f"\nStart it with this command; add the flags of data, tokenizer, optimizer and checkpoints:\n\n"
        f"{command(flags, cluster)}\n\nA dry run on this machine (docs/dry-run.md):\n\n"
        f"{dry_run_command(flags, job, cluster)}"
    )
    write_files(config, result, job, cluster)


def cluster_for_days(config: PlanConfig, job: Job) -> Cluster:
    """The smallest cluster that trains on --tokens within --days.

    Raises:
        InputError: there is none, or the GPU is unknown.
    """
    assert config.tokens is not None and config.days is not None

    def sized(gpus: int) -> Cluster:
        return make_cluster(dataclasses.replace(config, gpus=gpus, days=None))

    check_precision(job.fp8_format, sized(1).device)
    cluster, _ = fewest_gpus(job, config.tokens, config.days * 86400, sized)
    print(
        f"{cluster.devices:,} GPUs are the fewest that train on {config.tokens:.6g} tokens in {config.days:g} days"
    )
    return cluster


def print_changes(config: PlanConfig, plan: Plan, job: Job, cluster: Cluster) -> None:
    """Print what fits in a plan's layout, and what single changes to it or to the cluster would bring."""
    print(f"{limits(plan, job, cluster)}\n\nSingle changes to it:")
    for words, other in other_choices(plan, job, cluster):
        print(f"  {words:<26}{why_not(other, plan, job, cluster)}")
    if config.what_if:
        print(f"\n{what_if(plan, job, cluster)}")


def print_notes(config: PlanConfig, plan: Plan, job: Job, cluster: Cluster) -> None:
    """Print how far to trust a plan, and its days, cost and failures if they are asked for."""
    if config.cluster is None:
        gpu, mixture = cluster.device.name, job.model.num_experts is not None
        constants = find_constants(gpu)
        band = f"  note    the step's time is +-{constants.band(mixture=mixture):.0%}: "
        if constants.fitted:
            band += (
                f"the mean error over published runs on GPUs of the generation of {generation(gpu)}, or of mixtures on "
                "newer ones, that no constant is fitted to (docs/scaling.md)"
            )
        else:
            band += (
                f"a guess, since speeds of {generation(gpu)} are those of public tests of single operations"
            )
        print(f"{band}. This program is not measured on GPU clusters")
    if config.tokens is not None:
        steps = config.tokens / (job.global_batch_size * job.seq_length)
        hours = steps * plan.step.seconds / 3600
        print(
            f"  {config.tokens / 1e9:,.6g} billion tokens are {steps:,.0f} steps: {two_digits(hours / 24)} days, "
            f"{two_digits(hours * cluster.devices)} GPU-hours, without evaluation, checkpoints and interruptions"
        )
        if spent := expenses(hours * cluster.devices, config.gpu_hour_price, config.gpu_watts):
            print(f"  {spent}")
    if config.gpu_hours_between_failures is not None:
        failures = Failures(
            config.gpu_hours_between_failures * 3600 / cluster.devices,
            config.checkpoint_seconds,
            config.restart_minutes * 60,
        )
        interval = failures.best_interval
        print(
            f"  a failure every {failures.between / 3600:.2g} hours; a checkpoint every {interval / 60:.2g} minutes "
            f"({max(1, round(interval / plan.step.seconds)):,} steps) loses the least and leaves "
            f"{failures.goodput(interval):.0%} of the time for training"
        )


def plan_given(config: PlanConfig, args: dict[str, Any], command: list[str]) -> None:
    """Predict the layout of a training command.

    Raises:
        InputError: a flag describes the model or the batch, which the command does; or the command is wrong.
    """
    import megatron.plugins  # noqa: F401 (registers plug-ins; needs torch)
    from megatron.arguments import parse_run_config
    from megatron.planner.given import given_run
    from megatron.pretrain_gpt import DEFAULTS

    described = {f.name for f in dataclasses.fields(ModelConfig)} | {
        *("model", "global_batch_size", "seq_length", "fp8_format", "vocab_size", "explain"),
        *("json", "picture", "days", "longest_seq_length"),
    }
    for name in described & set(args):
        raise InputError(
            f"--{name.replace('_', '-')} has no place before --: the command after it says what to plan"
        )
    cluster = make_cluster(config)
    scripts = [i for i, word in enumerate(command) if word.endswith(".py")]
    flags = [*(command[scripts[-1] + 1 :] if scripts else command), "--dry-run"]
    run = parse_run_config([*flags, "--world-size", str(cluster.devices)], description="", defaults=DEFAULTS)
    job, layout = given_run(run, cluster.devices)
    check_precision(job.fp8_format, cluster.device)
    plan = make_plan(job, layout, cluster)
    print(f"given layout: {heading(job, cluster)}\n{plan.layout}")
    print(
        f"  step    {two_digits(plan.step.seconds)} s, {two_digits(tflops(plan, job, cluster))} TFLOP/s a GPU\n"
        f"{details(plan, cluster)}"
    )
    if not fits(plan.memory, cluster):
        print("  note    it does not fit")
    print_notes(config, plan, job, cluster)
    print_changes(config, plan, job, cluster)
    if config.trace is not None:
        write_trace(Simulator(job, layout, cluster, OURS), Path(config.trace))


def make_job(config: PlanConfig, args: dict[str, Any]) -> Job:
    """Return the job: a named model, changed by other flags, or one from flags alone.

    Raises:
        InputError: there is no model; a size is missing; samples are longer than --max-position-embeddings; or the
            model has ALiBi.
    """
    known: dict[str, Any] = {}
    seq_length, batch = config.seq_length, config.global_batch_size
    vocab_size = config.vocab_size or VOCAB_SIZE
    if config.model is not None:
        _, named = find_preset(config.model)
        if isinstance(named, Published):
            known = {
                "num_layers": named.layers,
                "hidden_size": named.hidden,
                "num_attention_heads": named.heads,
            }
        else:
            known, vocab_size = dict(named.fields), config.vocab_size or named.vocab_size
        seq_length, batch = seq_length or named.seq_length, batch or named.global_batch_size
    elif "num_layers" not in args:
        raise InputError("--model or --num-layers is required")
    if seq_length is None or batch is None:
        name = "--seq-length" if seq_length is None else "--global-batch-size"
        raise InputError(f"{name} is required without --model")
    sizes = {"max_position_embeddings": seq_length, **known}
    model = make_config(ModelConfig, sizes | {k: v for k, v in args.items() if k in field_types(ModelConfig)})
    if model.position_embedding_type == "alibi":
        raise InputError(
            "--position-embedding-type: alibi is not planned, since the times of attention with a bias are not known; "
            "a dry run of one layout counts its memory (docs/dry-run.md)"
        )
    if seq_length > model.max_position_embeddings:
        raise InputError(
            f"--seq-length: {seq_length} is longer than --max-position-embeddings {model.max_position_embeddings}"
        )
    return Job(model, seq_length, vocab_size, batch, config.fp8_format)


def make_cluster(config: PlanConfig) -> Cluster:
    """Return the cluster.

    Raises:
        InputError: the number of devices is missing, the GPU is unknown, or the file is wrong.
    """
    if config.cluster is not None:
        for name, value in (("--gpus", config.gpus), ("--gpu", config.gpu)):
            if value is not None:
                raise InputError(
                    f"{name}: contradicts --cluster, whose file describes the devices; leave out one of the two"
                )
        return read_cluster(Path(config.cluster))
    gpus = config.gpus or (find_preset(config.model)[1].gpus if config.model else None)
    if gpus is None:
        raise InputError(
            f"--gpus or --cluster is required with --model {config.model}"
            if config.model
            else "--gpus or --cluster is required without --model"
        )
    sheet = data_sheet(config.gpu or A100_80GB, where="--gpu")
    return with_constants(cluster_from_data_sheet(sheet, gpus), find_constants(sheet.name))


def check_precision(fp8_format: str | None, device: Device) -> None:
    """Check that the device's speed is known in the formats of a run.

    Raises:
        InputError: it is not.
    """
    if fp8_format is not None and (device.fp8 is None or device.precision != "bf16"):
        raise InputError(
            f"--fp8-format: {device.name} in {device.precision} has no peak of FP8 products; choose another --gpu, or "
            "give device.fp8 in the file of --cluster (docs/scaling.md)"
        )


def check_files(config: PlanConfig) -> None:
    """Check that the output files can be written, before the work.

    Raises:
        InputError: one cannot.
    """
    for name in ("json", "trace", "picture"):
        if (value := getattr(config, name)) is not None:
            path = Path(value)
            check_output_file(f"--{name}", path)
            if name == "picture" and path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
                raise InputError(
                    f"--picture: {path} needs matplotlib for PNG: pip install matplotlib, or end the name with .svg"
                )


def write_trace(simulator: Simulator, path: Path) -> None:
    """Write the file of --trace.

    Raises:
        InputError: it cannot be written.
    """
    trace = {"traceEvents": trace_events(simulator), "displayTimeUnit": "ms"}
    write_output_file("--trace", path, json.dumps(trace))


def write_files(config: PlanConfig, result: SearchResult, job: Job, cluster: Cluster) -> None:
    """Write the files of --json, --trace and --picture.

    Raises:
        InputError: a file cannot be written.
    """
    simulator = Simulator(job, result.plans[0].layout, cluster, OURS)
    if config.json is not None:
        plans = [
            {
                **dataclasses.asdict(plan),
                "tflops": tflops(plan, job, cluster),
                "command": command(command_flags(plan, job, cluster, config.tokens), cluster),
            }
            for plan in result.plans
        ]
        record = {
            "devices": cluster.devices,
            "layouts": result.layouts,
            "timed": result.timed,
            "too large": result.too_large,
            "plans": plans,
        }
        write_output_file("--json", Path(config.json), json.dumps(record, indent=2) + "\n")
    if config.trace is not None:
        write_trace(simulator, Path(config.trace))
    if config.picture is not None:
        write_picture(simulator, Path(config.picture))


if __name__ == "__main__":
    run_command(main)
