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
import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.commands.plan_inputs import A100_80GB, PlanConfig, check_precision, make_cluster, make_job
from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.planner.budget import Failures, expenses, two_digits
from megatron.planner.cluster import Cluster
from megatron.planner.device_specs import data_sheet
from megatron.planner.explain import other_choices, takeaways, why_not
from megatron.planner.layout import Job
from megatron.planner.our_program import simulator_of
from megatron.planner.picture import write_picture
from megatron.planner.presets import find_preset
from megatron.planner.profiles import ERRORS, expected_error, find_constants, generation, known_generation
from megatron.planner.questions import MAX_GPUS, fewest_gpus, longest_of_all
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
from megatron.planner.search import Plan, SearchResult, make_plan, search, with_automatic_schedules
from megatron.planner.shape import parse_shape
from megatron.planner.trace import trace_events
from megatron.planner.unplanned import model_notes, notes, run_on
from megatron.tool import check_output_file, write_output_file

NUM_PLANS = 10  # shown


def main(argv: Sequence[str] | None = None) -> None:
    hint = "--layout T8P4D8b1 plans given sizes, and flags of a training command come after --"
    parser = Parser(hint, description=__doc__)
    add_flags(parser, PlanConfig, "plan")
    named = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads"), "that of --model")
    add_flags(parser, ModelConfig, "model", named)
    line = list(sys.argv[1:] if argv is None else argv)
    given = line.index("--") if "--" in line else len(line)
    args = vars(parser.parse_args(line[:given]))
    config = make_config(PlanConfig, args)
    if config.calibrate is not None:
        if others := sorted(args.keys() - {"calibrate"}):
            raise InputError(
                f"--calibrate: measures this machine alone; leave out --{others[0].replace('_', '-')}"
            )
        check_output_file("--calibrate", Path(config.calibrate))
        from megatron.planner.calibrate import calibrate

        calibrate(Path(config.calibrate))
        return
    for name in ("checkpoint_seconds", "restart_minutes"):
        if name in args and config.gpu_hours_between_failures is None:
            raise InputError(f"--{name.replace('_', '-')} needs --gpu-hours-between-failures")
    check_files(config)
    if given < len(line):
        plan_given(config, args, line[given + 1 :])
    else:
        plan_best(config, args)


def plan_best(config: PlanConfig, args: dict[str, Any]) -> None:
    """Search for the fastest layouts, and print them with the command of the best.

    Raises:
        InputError: the job or the cluster is not described, or no layout fits.
    """
    job = make_job(config, args)
    if config.days is not None:
        cluster = cluster_for_days(config, job)
    else:
        cluster = make_cluster(config)
    check_precision(job, cluster.device)
    among = None if config.layout is None else [parse_shape(config.layout, job, cluster)]
    with tqdm(desc="layouts", unit="", leave=False, disable=not sys.stderr.isatty()) as bar:
        result = search(
            job, cluster, num_plans=NUM_PLANS, progress=lambda n: bar.update(n - bar.n), among=among
        )
    result = with_automatic_schedules(result, job, cluster)
    best = result.plans[0]
    name = find_preset(config.model)[0] if config.model else "model"
    print(f"{name}: {heading(job, cluster)}")
    print(
        f"layouts that divide them: {result.layouts:,}; simulated: {result.timed:,}; too large: {result.too_large:,}; "
        "the rest are slower than those below\n"
    )
    print(table(result, job, cluster))
    print(f"\nThe best: {best.layout}\n{details(best, cluster)}")
    print_notes(config, best, job, cluster, model_notes(job.model))
    if config.longest_seq_length:
        length, layout = longest_of_all(job, cluster)
        print(f"  longest sample that fits the cluster, by memory alone: {length:,} tokens, in {layout}")
    print_changes(best, job, cluster)
    if config.what_if:

        def best_on(other: Cluster) -> Plan:
            found = search(job, other, num_plans=1, progress=lambda count: None, among=among)
            return with_automatic_schedules(found, job, other).plans[0]

        layouts = (
            "with the best layout of each" if among is None else "each with the best layout of these sizes"
        )
        print(f"\n{what_if(best, cluster, best_on, layouts)}")
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

    check_precision(job, sized(1).device)
    sheet = data_sheet(config.gpu or A100_80GB, where="--gpu")
    most = MAX_GPUS if sheet.node else sheet.joined
    cluster, _ = fewest_gpus(job, config.tokens, config.days * 86400, sized, most)
    print(
        f"the fewest GPUs that train on {config.tokens / 1e9:,.6g} billion tokens in {config.days:g} days: "
        f"{cluster.devices:,}"
    )
    return cluster


def print_changes(plan: Plan, job: Job, cluster: Cluster) -> None:
    """Print what fits in a plan's layout, and what single changes to it would bring."""
    print(f"{limits(plan, job, cluster)}\n\nSingle changes to it:")
    for words, other in other_choices(plan, job, cluster):
        print(f"  {words:<34}{why_not(other, plan, job, cluster)}")


def print_notes(config: PlanConfig, plan: Plan, job: Job, cluster: Cluster, left_out: Sequence[str]) -> None:
    """Print how far to trust a plan, and its days, cost and failures if they are asked for.

    Args:
        left_out: flags that the plan leaves out.
    """
    for note in left_out:
        print(f"  note    {note}")
    if config.cluster is None:
        band = error_band(cluster.device.name, mixture=job.model.num_experts is not None)
        copies = ", and the speed of copies to host memory is assumed" if plan.layout.uses_host else ""
        print(f"  note    {band}. This program is not measured on GPU clusters{copies}")
    else:
        print(
            "  note    no error is known for clusters described in a file: time some steps on one node, and adjust "
            f"efficiency in {config.cluster} until the prediction agrees (docs/scaling.md)"
        )
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
        print(f"  {failures.advice(plan.step.seconds)}")


def error_band(gpu: str, *, mixture: bool) -> str:
    """Describe the error to expect of the time of a step on a GPU, for a mixture of experts or a dense model."""
    constants, of_gpu = find_constants(gpu), known_generation(gpu)
    if of_gpu is None:
        return (
            "the error of the step's time is not known: no runs on this GPU are published, and its constants are those "
            f"of {generation(gpu)} (docs/scaling.md)"
        )
    band = f"the step's time is +-{expected_error(gpu, mixture=mixture):.0%}: "
    if not constants.fitted:
        return f"{band}a guess, since speeds of {of_gpu} are those of public tests of single operations"
    runs = f"mixtures on GPUs of newer generations than {of_gpu}"
    if not mixture or ERRORS[of_gpu][True] is not None:
        runs = f"{'mixtures' if mixture else 'dense models'} on GPUs of the generation of {of_gpu}"
    return (
        f"{band}the mean error over published runs of {runs}, without those that constants are fitted to "
        "(docs/scaling.md)"
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
        *("days", "layout", "longest_seq_length"),
    }
    for name in sorted(described & set(args)):
        raise InputError(
            f"--{name.replace('_', '-')} cannot be given before --: the command after it says what to plan"
        )
    if not command:
        raise InputError("-- must be followed by a training command or its flags")
    flags, processes = training_flags(command)
    if config.cluster is None:
        if config.gpus is None and processes is None:
            raise InputError("the number of GPUs is required: give --gpus, --cluster, or a torchrun command")
        config = dataclasses.replace(config, gpus=config.gpus or processes)
    cluster = make_cluster(config)
    if processes not in (None, cluster.devices):
        raise InputError(
            f"-- {command[0]}: starts {processes} processes, and the cluster has {cluster.devices} devices; make them "
            "equal"
        )
    flags.append("--dry-run")
    run = parse_run_config([*flags, "--world-size", str(cluster.devices)], description="", defaults=DEFAULTS)
    job, layout = given_run(run, cluster.devices)
    cluster = run_on(run, layout, cluster)
    check_precision(job, cluster.device)
    plan = make_plan(job, layout, cluster)
    print(f"given layout: {heading(job, cluster)}\n{plan.layout}")
    print(
        f"  step    {two_digits(plan.step.seconds)} s, {two_digits(tflops(plan, job, cluster))} TFLOP/s a GPU\n"
        f"{details(plan, cluster)}"
    )
    print_notes(config, plan, job, cluster, notes(run))
    print_changes(plan, job, cluster)
    if config.what_if:
        given = functools.partial(make_plan, job, layout)
        print(f"\n{what_if(plan, cluster, given, 'in the given layout')}")
    write_files(config, SearchResult([plan], layouts=1, timed=1, too_large=0), job, cluster)


def training_flags(command: list[str]) -> tuple[list[str], int | None]:
    """Flags of pretrain_gpt.py in a command, which may be those flags alone, and its number of processes if it says so.

    Raises:
        InputError: it starts another program.
    """
    from megatron.commands.verify import parse_command

    if command[0].startswith("-"):
        return list(command), None
    script, processes, flags = parse_command(command)
    if script != "pretrain_gpt":
        raise InputError(f"-- {script}.py: only commands of pretrain_gpt.py are planned")
    return flags, processes


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


def write_files(config: PlanConfig, result: SearchResult, job: Job, cluster: Cluster) -> None:
    """Write the files of --json, --trace and --picture.

    Raises:
        InputError: a file cannot be written.
    """
    simulator = simulator_of(job, result.plans[0].layout, cluster)
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
        trace = {"traceEvents": trace_events(simulator), "displayTimeUnit": "ms"}
        write_output_file("--trace", Path(config.trace), json.dumps(trace))
    if config.picture is not None:
        write_picture(simulator, Path(config.picture))


if __name__ == "__main__":
    run_command(main)
