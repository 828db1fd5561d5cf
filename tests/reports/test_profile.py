"""--profile: trace, summary and errors."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import CPU, config_of
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from megatron.errors import InputError
from megatron.optim.optimizer import Optimizer
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.phases import NOTHING, Phases
from megatron.reports.profile import Profiler, annotated, summary

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 2 --hidden-size 16 --eval-iters 0
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 4 --lr 1e-3 --num-workers 0
    --device cpu --profile --profile-step-start 1 --profile-step-end 3
""".split()


def test_trace_and_summary(pretrain: Callable[..., str], tmp_path: Path) -> None:
    out = pretrain(*FLAGS, "--tensorboard-dir", tmp_path)
    stem = str(tmp_path / "profile" / "iterations-2-3-rank-0")
    assert f"profile of iterations 2 to 3, rank 0: summary in {stem}.txt, the trace in {stem}.pt." in out

    events = json.loads(gzip.decompress(Path(f"{stem}.pt.trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for phase in ("batch-generator", "forward-compute", "backward-compute", "grads-reduce", "optimizer"):
        assert names.count(phase) == 2, phase

    page = Path(f"{stem}.txt").read_text()
    shares = re.findall(r"^([a-zA-Z ]+?) +[\d.]+ +([\d.]+)%$", page.partition("By operator")[0], re.M)
    assert {"products", "attention", "optimizer", "pointwise and the rest", "Python and autograd"} <= set(
        dict(shares)
    )
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=1)


def test_the_default_folder_is_that_of_save(pretrain: Callable[..., str], tmp_path: Path) -> None:
    out = pretrain(*FLAGS, "--save", tmp_path, "--profile-step-end", 100)
    assert "profile of iterations 2 to 4, rank 0" in out
    assert (tmp_path / "profile" / "iterations-2-4-rank-0.txt").is_file()
    out = pretrain(*FLAGS, "--save", tmp_path, "--load", tmp_path, "--train-iters", 5)
    assert "--profile: iterations 2 to 3 are not in this run, which has 5 to 5; nothing is profiled" in out


def test_a_run_that_ends_while_profiling(pretrain: Callable[..., str], tmp_path: Path) -> None:
    """Finished iterations are in the summary; saving after them is only in the trace."""
    out = pretrain(*FLAGS, "--profile-step-end", 4, "--exit-interval", 3, "--save", tmp_path)
    stem = tmp_path / "profile" / "iterations-2-3-rank-0"
    assert f"profile of iterations 2 to 3, rank 0: summary in {stem}.txt" in out
    page = stem.with_suffix(".txt").read_text()
    assert re.search(r"^ProfilerStep\* +1 ", page, re.M), page
    assert gzip.decompress(Path(f"{stem}.pt.trace.json.gz").read_bytes())

    for step, kept in ((3, ["iterations-2-2-rank-0.pt.trace.json.gz", "iterations-2-2-rank-0.txt"]), (2, [])):
        folder, steps = tmp_path / f"interrupted-{step}", iter(range(1, step))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Optimizer, "step", interrupted(Optimizer.step, steps))
            with pytest.raises(KeyboardInterrupt):
                pretrain(*FLAGS, "--tensorboard-dir", folder)
        assert sorted(path.name for path in (folder / "profile").iterdir()) == kept


def interrupted(function: Callable, calls: Iterator[int]) -> Callable:
    """Make `function` raise KeyboardInterrupt once `calls` is exhausted."""

    def call(*arguments, **named):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    return call


@pytest.mark.parametrize("suffix", [".txt", ".pt.trace.json.gz"])
def test_a_full_disk_loses_only_the_profile(
    pretrain: Callable[..., str], tmp_path: Path, suffix: str
) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / f"iterations-2-3-rank-0{suffix}").symlink_to("/dev/full")
    out = pretrain(*FLAGS, "--tensorboard-dir", tmp_path)
    assert (
        f"--profile: {folder}: the profile of rank 0 cannot be written, and is lost: No space left on" in out
    )
    assert "profile of iterations" not in out
    assert "  4/4  loss " in out


def test_bad_input(pretrain: Callable[..., str], tmp_path: Path) -> None:
    for flags, message in (
        ([], "--profile needs --tensorboard-dir or --save"),
        (["--profile-step-end", 1], "--profile-step-end: 1 must be greater than --profile-step-start 1"),
        (["--save", tmp_path, "--profile-ranks", 0, 1], "--profile-ranks: 1 is not a rank of this run"),
    ):
        with pytest.raises(InputError, match=message):
            pretrain(*FLAGS, *flags)
    (tmp_path / "profile").touch()
    with pytest.raises(InputError, match=f"--profile: {tmp_path}/profile: File exists"):
        pretrain(*FLAGS, "--tensorboard-dir", tmp_path)


def test_only_the_chosen_ranks_are_profiled(tmp_path: Path) -> None:
    config = config_of(f"{' '.join(FLAGS)} --save {tmp_path}")
    axes = {"world": Axis(rank=1, size=2), "pp": ALONE, "device": CPU}
    engine = SimpleNamespace(mesh=SimpleNamespace(**axes), phases=Phases())
    profiler = Profiler(config, engine, iterations=range(1, 5), log=print)
    profiler.advance(1)
    assert profiler.torch is None


def test_phases_are_annotated_while_profiling() -> None:
    phases = Phases()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with annotated(phases), profile, phases("forward-compute"), phases("optimizer"):
        pass
    assert {event.name for event in profile.events()} >= {"forward-compute", "optimizer"}
    assert phases("forward-compute") is NOTHING


def host_event(
    name: str, begin: float, end: float, parent: SimpleNamespace | None = None, **fields
) -> SimpleNamespace:
    event = {"name": name, "device_type": DeviceType.CPU, "is_async": False, "thread": 1, "kernels": []}
    event |= {"is_user_annotation": False, "cpu_parent": parent, "time_range": Interval(begin, end)}
    return SimpleNamespace(**event | fields)


def kernel(name: str, begin: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, device_type=DeviceType.CUDA, is_async=False, time_range=Interval(begin, end)
    )


def test_summary_of_a_gpu() -> None:
    """Two iterations of 10 ms: kernels attributed to their launching operators, and a CUDA graph's by its name."""
    step = host_event("ProfilerStep*", 0, 10_000, is_user_annotation=True)
    phase = host_event("optimizer", 0, 1000, step, is_user_annotation=True)

    def launched(name: str, kernel: str, duration: float, parent: SimpleNamespace) -> SimpleNamespace:
        return host_event(name, 0, 10, parent, kernels=[SimpleNamespace(name=kernel, duration=duration)])

    events = [
        step,
        host_event("ProfilerStep*", 10_000, 20_000, is_user_annotation=True),
        phase,
        launched("aten::mm", "sm90_xmma_gemm_bf16", 8000, step),
        launched("aten::mul_", "vectorized_elementwise_kernel", 1000, phase),
        launched("aten::gelu", "vectorized_elementwise_kernel", 2000, step),
        host_event("cudaStreamSynchronize", 15_000, 16_000),
        host_event("cudaDeviceSynchronize", 20_000, 29_000),  # the profiler's own synchronization at its end
        kernel("optimizer", 0, 20_000),  # the same phase in the GPU's timeline
        kernel("sm90_xmma_gemm_bf16", 0, 8000),
        kernel("vectorized_elementwise_kernel", 8000, 9000),
        kernel("vectorized_elementwise_kernel", 9000, 11_000),
        kernel("flash_fwd_kernel", 10_000, 14_000),
        kernel("Memcpy DtoD (Device -> Device)", 14_000, 15_000),
    ]
    page = summary(events, "two iterations", 2)
    rows = re.findall(r"^(.*?) {2,}(?:\d+ +)?([\d.]+) +([\d.]+)%$", page.partition("By kernel")[0], re.M)
    assert {name: (float(ms), float(share)) for name, ms, share in rows} == {
        "products": (4, 40),
        "attention": (2, 20),
        "pointwise and the rest": (1, 10),
        "optimizer": (0.5, 5),
        "copies": (0.5, 5),
        "(the GPU idle)": (2.5, 25),
        "(the host waiting for the GPU)": (0.5, 5),
    }
    assert page.startswith("two iterations: 10.00 ms an iteration\n")
    assert re.search(r"^vectorized_elementwise_kernel +1 +1\.50 +15\.0%$", page, re.M)
