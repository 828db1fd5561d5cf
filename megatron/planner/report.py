"""Plans as text, and as a command line."""

from __future__ import annotations

import dataclasses
import math
import shlex
import textwrap
from collections.abc import Callable

from megatron.flags import flag_name
from megatron.model.config import ModelConfig
from megatron.planner.budget import many, percent, two_digits
from megatron.planner.cluster import Cluster
from megatron.planner.explain import EQUAL_TIME, PARTS, slower_by
from megatron.planner.host_copies import USABLE_HOST
from megatron.planner.layout import Job
from megatron.planner.memory import fits, usable_memory
from megatron.planner.our_program import needs_uncompiled_layers
from megatron.planner.parameters import model_parameters
from megatron.planner.questions import largest_micro_batch, longest_sequence, other_clusters
from megatron.planner.search import Plan, SearchResult
from megatron.reports.flops import unused_parameters


def heading(job: Job, cluster: Cluster) -> str:
    """Size of the model, of the cluster and of a step."""
    nodes = "one node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes of {cluster.per_node}"
    if cluster.nvlink_domain is not None:
        nodes += f" in NVLink domains of {cluster.nvlink_domain}"
    parameters = model_parameters(job)
    products = "" if job.fp8_format is None else ", FP8 products"
    size = in_words(parameters)
    if job.model.num_experts is not None:
        size += f" parameters ({in_words(parameters - unused_parameters(job.model))} active)"
    else:
        size += " parameters"
    return (
        f"{size} on {cluster.devices:,} "
        f"{cluster.device.name} ({nodes}, {cluster.device.precision}{products}); "
        f"{many(job.global_batch_size, 'sample')} of {many(job.seq_length, 'token')} per step"
    )


def in_words(count: float) -> str:
    """A number of parameters."""
    return f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:,.4g} million"


def table(result: SearchResult, job: Job, cluster: Cluster) -> str:
    """The best plans, and why each is slower than the first. TFLOP/s are the model's, without recomputation."""
    rows = ["    TFLOP/s   step s  bubble  comm.  recomp.  GB used  free  layout"]
    usable = usable_memory(cluster)
    for number, plan in enumerate(result.plans, start=1):
        step = plan.step
        shares = (step.bubble, communication(plan), step.recompute)
        shown = "".join(f"{percent(share / step.seconds):>8}" for share in shares)
        used, free = plan.memory.total / 1e9, (usable - plan.memory.total) / 1e9
        speed = f"{two_digits(tflops(plan, job, cluster)):>8}{two_digits(step.seconds):>9}"
        reason = "" if number == 1 else f": {slower_by(plan, result.plans[0])}"
        rows.append(f"{number:3}{speed}{shown}{used:8.1f}{free:6.1f}  {plan.layout}{reason}")
    return "\n".join(rows)


def communication(plan: Plan) -> float:
    """Seconds of exposed communication."""
    step = plan.step
    return (
        step.tensor_parallel + step.expert_parallel + step.context_parallel + step.transfers + step.gradients
    )


def tflops(plan: Plan, job: Job, cluster: Cluster) -> float:
    """Model TFLOP/s per device, without recomputation."""
    return job.flops() / plan.step.seconds / cluster.devices / 1e12


def details(plan: Plan, cluster: Cluster) -> str:
    """Breakdown of a plan's step time and memory."""
    step, memory = plan.step, plan.memory
    names = PARTS | {
        "ends": "embedding and output layer",
        "host": "waiting for the host",
        "transfers": "transfers between stages",
        "bubble": "bubble",
        "optimizer": "optimizer",
        "host_copies": "waiting for copies of activations",
    }
    shares = {words: getattr(step, name) / step.seconds for name, words in names.items()}
    time = ", ".join(f"{words} {percent(share)}" for words, share in shares.items() if share >= 0.0005)
    sizes = {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory) if f.name != "host"}
    kinds = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in sizes.items() if size or name != "backup")
    usable = usable_memory(cluster)
    free = (usable - memory.total) / 1e9
    rest = f"{free:.1f} GB free" if free >= 0 else f"it does not fit: {-free:.1f} GB too many"
    return (
        f"  time    {time}\n"
        f"  memory  {kinds}: {memory.total / 1e9:.1f} GB on the largest stage, {usable / 1e9:.1f} GB usable; "
        f"{rest}{host_memory(plan, cluster)}"
    )


def host_memory(plan: Plan, cluster: Cluster) -> str:
    """A line about host memory, if a plan needs it."""
    needed, host = plan.memory.host / 1e9, cluster.host
    if not needed:
        return ""
    speeds = f"assumed: copies at {host.copy / 1e9:.3g} GB/s, {host.exchange / 1e9:.3g} GB/s in both directions at once"
    if host.memory is None:
        return f"\n  host    {needed:.3g} GB for each device, of a size that is not known; {speeds}"
    usable = USABLE_HOST * host.memory / 1e9
    rest = "" if needed <= usable else f"; it does not fit: {needed - usable:.1f} GB too many"
    return f"\n  host    {needed:.3g} GB of the {usable:.3g} GB usable for each device; {speeds}{rest}"


def limits(plan: Plan, job: Job, cluster: Cluster) -> str:
    """The longest sample and the largest microbatch that fit in a plan's layout."""
    length, size = longest_sequence(job, plan.layout, cluster), largest_micro_batch(job, plan.layout, cluster)
    if not length or not size:
        return f"  limits  no sample of {job.seq_length:,} tokens fits in this layout"
    return (
        f"  limits  in this layout samples of up to {length:,} tokens fit, or microbatches of up to "
        f"{many(size, 'sample')} of {job.seq_length:,} tokens"
    )


def what_if(plan: Plan, cluster: Cluster, plan_on: Callable[[Cluster], Plan], layouts: str) -> str:
    """The speed on clusters with faster links or more memory, over a plan's.

    Args:
        plan_on: the plan on another cluster, chosen as `plan` was on this one.
        layouts: the choice in words.
    """
    rows = [f"What if ({layouts}):"]
    for words, other in other_clusters(cluster):
        best = plan_on(other)
        gain = plan.step.seconds / best.step.seconds - 1
        change = "no faster" if gain < EQUAL_TIME else f"{percent(gain)} faster"
        if fits(best.memory, other) and not fits(plan.memory, cluster):
            change += ", and it fits"
        layout = "" if best.layout == plan.layout or gain < EQUAL_TIME else f": {best.layout}"
        rows.append(f"  {words:<34}{change}{layout}")
    return "\n".join(rows)


def command_flags(plan: Plan, job: Job, cluster: Cluster, tokens: float | None) -> list[str]:
    """Flags of pretrain_gpt.py for a plan; with `tokens`, also the length of training."""
    precision = cluster.device.precision
    model = [
        flag_name(f) if isinstance(value, bool) else f"{flag_name(f)} {as_words(value)}"
        for f in dataclasses.fields(job.model)
        if (value := getattr(job.model, f.name)) != f.default and f.name not in derived_fields(job.model)
    ]
    flags = [*model, f"--seq-length {job.seq_length}", *plan.layout.flags(job)]
    if needs_uncompiled_layers(plan.layout, cluster):
        flags.append("--no-torch-compile")
    if precision != "fp32":
        flags.append(f"--{precision}")
    if job.fp8_format is not None:
        flags.append(f"--fp8-format {job.fp8_format}")
    if job.vocab_divisor != 128:
        flags.append(f"--make-vocab-size-divisible-by {job.vocab_divisor}")
    if tokens is not None:
        flags.append(f"--train-samples {math.ceil(tokens / job.seq_length)}")
    return flags


def as_words(value: object) -> str:
    """The value of a flag on a command line."""
    return shlex.join(map(str, value if isinstance(value, tuple) else (value,)))


def command(flags: list[str], cluster: Cluster) -> str:
    """The command line to run on each node."""
    program = (
        f"python -m torch.distributed.run --nproc-per-node {min(cluster.per_node, cluster.devices)} "
        f"--nnodes {cluster.nodes}"
    )
    if cluster.nodes > 1:
        program += " --node-rank RANK --master-addr HOST --master-port 6000"
    return _lines(program, "pretrain_gpt.py", *_wrapped(flags))


def dry_run_command(flags: list[str], job: Job, cluster: Cluster) -> str:
    """The command line of a dry run of the plan, for one process."""
    # NullTokenizer adds an end-of-text token to its ids.
    rest = [
        "--dry-run",
        f"--world-size {cluster.devices}",
        "--tokenizer-type NullTokenizer",
        f"--vocab-size {job.vocab_size - 1}",
        "--lr 1e-4",
    ]
    if not any(flag.startswith("--train-samples") for flag in flags):
        rest.append("--train-iters 1")
    return _lines("python pretrain_gpt.py", *_wrapped([*flags, *rest]))


def _wrapped(flags: list[str]) -> list[str]:
    return textwrap.wrap(" ".join(flags), 100, break_long_words=False, break_on_hyphens=False)


def _lines(*lines: str) -> str:
    return " \\\n    ".join(lines)


def derived_fields(model: ModelConfig) -> set[str]:
    """Fields whose value follows from other fields, so that they need no flag."""
    given = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "kv_channels",
        "group_query_attention",
        "max_position_embeddings",
        "swiglu",
        "activation_function",
    )
    plain = ModelConfig(**{name: getattr(model, name) for name in given})
    derived = {
        name
        for name in ("ffn_hidden_size", "num_query_groups")
        if getattr(plain, name) == getattr(model, name)
    }
    if model.multi_latent_attention or model.kv_channels * model.num_attention_heads == model.hidden_size:
        derived.add("kv_channels")
    return derived
