"""Verify that a layout trains the same model as one process would: at small sizes, on this machine.

megatron verify -- torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 ...
megatron verify --quick --processes 64 -- pretrain_gpt.py --tensor-model-parallel-size 4 ...
megatron verify --compare captures/one captures/other

Exits with status 1 if anything differs by more than rounding. docs/verify.md describes the comparisons.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import plugin_flags  # noqa: F401 (registers the flags of plug-ins)
from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.config import DataConfig
from megatron.errors import InputError, TrainingFault
from megatron.flags import Config, flag
from megatron.performance.config import OffloadConfig, PerformanceConfig
from megatron.training.config import RunConfig

if TYPE_CHECKING:
    from megatron.training.task import Task

NO_COMMAND = "the command to verify is required after --: megatron verify -- pretrain_gpt.py FLAGS"
DEFAULT_LAYOUTS = ("t2", "p2", "d2", "t2d2")
EXPERT_LAYOUTS = ("t2", "p2", "d2e2", "t2d2e2", "t2d2e4et1")
SCRIPTS = {"pretrain_gpt": "megatron.pretrain_gpt", "pretrain_bert": "megatron.pretrain_bert"}


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Config):
    """Layouts, sizes and output of a verification."""

    layouts: tuple[str, ...] | None = flag(
        None,
        "layouts to verify besides the run's own, by tensor-, context-, pipeline-, data-, expert- and "
        "expert-tensor-parallel sizes (default: those of t2 p2 d2 t2d2 that --max-processes allows; with experts t2 p2 "
        "d2e2 t2d2e2 t2d2e4et1)",
        nargs="+",
        metavar="tNcNpNdNeNetN",
    )
    processes: int | None = flag(
        None,
        "processes of the run (default: those of torchrun in the command, or two replicas of the model)",
        low=1,
    )
    max_processes: int = flag(8, "largest number of processes to start here", low=1, high=64)
    quick: bool = flag(False, "verify only the run's own layout, and its resume in that layout")
    output: str = flag("verify", "folder for certificate.html and certificate.json", metavar="DIR")
    keep: bool = flag(False, "keep captures, checkpoints and logs in --output")
    timeout: float = flag(300.0, "seconds after which a run is ended", above=0, high=10**6)
    compare: tuple[str, ...] | None = flag(
        None,
        "compare two captures of --capture, the reference first, instead of running a command; further captures are "
        "runs of the reference that round differently",
        nargs="+",
        metavar="DIR",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a comparison failed, otherwise 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--" not in words and any(map(script_name, words)):
        raise InputError(NO_COMMAND)
    command = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    parser = Parser(description=__doc__)
    add_flags(parser, VerifyConfig, "verify")
    config = make_config(VerifyConfig, vars(parser.parse_args(words)))
    if config.compare is not None:
        return compare(config, command)
    if not command:
        raise InputError(NO_COMMAND)
    return verify(config, command)


def compare(config: VerifyConfig, command: Sequence[str]) -> int:
    from megatron.verify.runner import compare_captures

    assert config.compare is not None
    if len(config.compare) < 2 or command:
        raise InputError(
            f"--compare: {' '.join(config.compare)} must be two captures or more, and no command"
        )
    check_output(config)
    begin = time.monotonic()
    check = compare_captures([Path(folder) for folder in config.compare])
    report(check)
    few = len(config.compare) == 2
    missing = (
        ["the optimizer's step, and later steps, which need captures that round differently"] if few else []
    )
    return write(config, " ".join(config.compare), [], [check], missing, begin)


def verify(config: VerifyConfig, command: list[str]) -> int:
    from megatron.training.layout import check_layout
    from megatron.variants.auto_stages import with_auto_layout
    from megatron.verify.config import check_precision
    from megatron.verify.runner import STEPS, Runs, Verification
    from megatron.verify.shrink import shrink

    begin = time.monotonic()
    script, processes, flags = parse_command(command)
    run = parse(script, flags)
    check_precision(run)
    run = with_auto_layout(run)
    parallel = run.parallel
    ranks = parallel.pipeline_model_parallel_size * math.lcm(
        parallel.tensor_model_parallel_size * parallel.context_parallel_size, parallel.expert_size
    )
    check_layout(run, config.processes or processes or ranks)
    wanted = config.processes or processes or 2 * ranks
    shrunk = shrink(run, wanted, config.max_processes, STEPS, task=task_of(script, run).name)
    usual = DEFAULT_LAYOUTS if run.model.num_experts is None else EXPERT_LAYOUTS
    layouts = [shrunk.layout, *other_layouts(config, shrunk.layout, usual)]
    check_output(config)
    print(
        f"verifying {script} in {shrunk.layout}, of {shrunk.layout.processes} processes; first runs of one process",
        flush=True,
    )
    changes = list(shrunk.changes)
    with contextlib.ExitStack() as contexts:
        # SIGTERM acts like Ctrl-C, so that processes end and temporary folders are removed.
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        contexts.callback(signal.signal, signal.SIGTERM, handler)
        folder = Path(config.output) / "runs"
        if config.keep:
            if folder.exists():
                raise InputError(f"--output: {folder} exists; name another folder")
            folder.mkdir(parents=True)
        else:
            folder = Path(contexts.enter_context(tempfile.TemporaryDirectory(prefix="megatron-verify-")))
        start = functools.partial(start_run, script, config.timeout)
        runs = Runs(shrunk, layouts, folder, start)
        if runs.batch != run.training.global_batch_size:
            changes.append(f"--global-batch-size: {run.training.global_batch_size} to {runs.batch}")
        verification = Verification(runs, layouts, report)
        checks = verification.run(quick=config.quick)
        if not config.quick and verification.saved.exists():
            checks.append(convert(verification.saved, folder / "converted"))
            report(checks[-1])
    missing = [
        not_read(run.data),
        "the sizes of the real run, and rounding at these sizes",
        "warm-up and decay of the learning rate",
        f"devices other than this CPU; the run has --device {run.training.device}",
        *left_out(run),
    ]
    if config.quick:
        missing.append("other layouts and resumes, which --quick leaves out")
    return write(config, shlex.join(command), changes, checks, missing, begin)


def not_read(data: DataConfig) -> str:
    """The data of a run, for the list of what is not covered."""
    packing = "" if data.packing == "concatenated" else f" and --packing {data.packing}"
    return f"the data files{packing}: all runs read the same synthetic data"


def left_out(run: RunConfig) -> list[str]:
    """Flags of a run that change the computation of its layout and that its shrunk runs do not have."""
    performance, offload = run.plugin(PerformanceConfig), run.plugin(OffloadConfig)
    flags = {
        "--tp-comm-overlap": performance.tp_comm_overlap,
        "--enable-optimizer-post-validation": performance.enable_optimizer_post_validation,
        "--cpu-offload-activations": offload.cpu_offload_activations,
    }
    return [f"{name}, which the runs leave out" for name, given in flags.items() if given]


def parse_command(command: Sequence[str]) -> tuple[str, int | None, list[str]]:
    """Split a command into the script's name, the number of torchrun's processes if it says so, and the flags."""
    for i, word in enumerate(command):
        if name := script_name(word):
            launcher = " ".join(command[:i]).replace("_", "-")
            ranks, nodes = (_count(launcher, option) for option in ("--nproc-per-node", "--nnodes"))
            return name, None if ranks is None else ranks * (nodes or 1), list(command[i + 1 :])
    raise InputError(
        f"{shlex.join(command)[:80]}: names neither pretrain_gpt.py nor pretrain_bert.py; for a launch script give the "
        "command that it prints after +"
    )


def script_name(word: str) -> str:
    """The name in `SCRIPTS` of the script that a word of a command names, or an empty string."""
    name = re.sub(r"\.py$", "", word.rpartition("/")[2]).rpartition(".")[2].replace("-", "_")
    return name if name in SCRIPTS else ""


def _count(launcher: str, option: str) -> int | None:
    """The value of an option of torchrun; None if it is not given."""
    found = re.search(rf"{option}[ =](\S+)", launcher)
    if found is None:
        return None
    if not found[1].isdecimal():
        raise InputError(f"{option} {found[1]} does not tell the number of processes; give a number")
    return int(found[1])


def other_layouts(config: VerifyConfig, own: Any, usual: Sequence[str] = DEFAULT_LAYOUTS) -> list[Any]:
    """The layouts to verify besides the run's own: those of the flags, or the usual ones."""
    from megatron.verify.layouts import Layout

    found = []
    for text in config.layouts or usual:
        parts = "".join(rf"(?:{axis}([0-9]+))?" for axis in ("t", "c", "p", "d", "e", "et"))
        match = re.fullmatch(f"(?=.){parts}", text)
        if match is None or "0" in match.groups():
            raise InputError(f"--layouts: {text} is not a layout such as t2p2d2 or t2d2e2et1")
        tp, cp, pp, dp, ep, etp = (size and int(size) for size in match.groups())
        layout = Layout(tp or 1, pp or 1, dp or 1, ep or 1, etp or None, cp or 1)
        if layout.processes > config.max_processes:
            if config.layouts is None:
                continue
            raise InputError(f"--layouts: {text} needs more than --max-processes {config.max_processes}")
        if layout != own and layout not in found:
            found.append(layout)
    return found


def parse(script: str, flags: Sequence[str]) -> RunConfig:
    import importlib

    import megatron.plugins  # noqa: F401 (fills the registries that flags are checked against)

    module = importlib.import_module(SCRIPTS[script])
    return parse_run_config(flags, description="", defaults=module.DEFAULTS)


def task_of(script: str, run: RunConfig) -> Task[Any]:
    """The task of a script with the flags of a run."""
    from megatron.pretrain_bert import bert
    from megatron.pretrain_gpt import GPT

    return GPT if script == "pretrain_gpt" else bert(binary_head=run.data.bert_binary_head)


def start_run(script: str, timeout: float, run: RunConfig, processes: int, spread: Any, log: Path) -> Any:
    """Run a configuration on its ranks; see `megatron.verify.runner.Start`."""
    from megatron.verify.launch import launch
    from megatron.verify.shrink import command_words

    return launch(train_rank, processes, (script, command_words(run), spread), log, timeout=timeout)


def train_rank(script: str, flags: list[str], spread: tuple[int, int] | None) -> None:
    """Train as one rank of a run; `spread` are the arguments of `DividedSums`."""
    from megatron import plugins
    from megatron.verify.spread import DividedSums

    run = parse(script, flags)
    status = plugins.run(run, task_of(script, run), [DividedSums(*spread)] if spread else [])
    if status:
        raise TrainingFault(f"the run ended with status {status}")


def convert(run: Path, folder: Path) -> Any:
    """Convert a checkpoint to Hugging Face and back, and compare all weights."""
    from megatron.commands import convert_checkpoint
    from megatron.commands.inspect_checkpoint import open_one
    from megatron.parallel.slices import whole
    from megatron.verify.runner import Check, empty_row

    check = Check(name="conversion to Hugging Face and back")
    there, back = folder / "huggingface", folder / "native"
    steps = (("native", "huggingface", run, there), ("huggingface", "native", there, back))
    for source, target, load, save in steps:
        words = ["--from", source, "--to", target, "--load", str(load), "--save", str(save)]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                convert_checkpoint.main(words)
        except InputError as error:
            # An architecture may have no counterpart; what was exported must be read.
            if target == "huggingface":
                check.not_covered = str(error)
            else:
                check.error = str(error)
            return check
        except TrainingFault as error:
            check.error = str(error)
            return check
    first, second = (open_one(path).tensors["model"] for path in (run, back))
    row = check.kinds["weight"] = empty_row()
    for name, tensor in first.index.items():
        row["compared"] += 1
        place = whole(*tensor["shape"])
        if name not in second.index or not second.read(name, place).equal(first.read(name, place)):
            row["failed"] += 1
            check.error += f"{name} differs after the conversion\n"
    return check


def report(check: Any) -> None:
    """Print the result of a check."""
    if check.not_covered:
        print(f"{check.name}: not covered: {check.not_covered}", flush=True)
        return
    word = "passed" if check.passed else "FAILED"
    print(
        f"{check.name}: {word}, {check.compared:,} comparisons, largest {check.largest:.3g} of its bound",
        flush=True,
    )
    if check.finding is not None:
        print(f"  {check.finding}", flush=True)
    if check.error:
        print("  " + check.error.replace("\n", "\n  "), flush=True)


def check_output(config: VerifyConfig) -> None:
    """Make the folder of the certificate, before anything is run."""
    folder = Path(config.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--output: {folder} cannot be written ({error.strerror})") from None


def write(
    config: VerifyConfig,
    command: str,
    changes: Sequence[str],
    checks: Sequence[Any],
    not_covered: Sequence[str],
    begin: float,
) -> int:
    """Write the certificate. Returns the exit status."""
    from megatron.verify.certificate import certificate, to_html, to_json

    found = certificate(command, changes, checks, not_covered, time.monotonic() - begin)
    folder = Path(config.output)
    try:
        (folder / "certificate.json").write_text(to_json(found), encoding="utf-8")
        (folder / "certificate.html").write_text(to_html(found, checks), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output: {folder} cannot be written ({error.strerror})") from None
    word = "passed" if found["passed"] else "FAILED"
    print(f"{word}: {found['compared']:,} comparisons; wrote {folder / 'certificate.html'}")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    run_command(main)
