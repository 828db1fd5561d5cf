"""The processes of a run, arranged by what they share.

`torchrun` gives each process a rank and the number of processes; `init_mesh` arranges them on the axes
pp, dp, cp, tp (tp fastest, the order of Megatron-LM). With one process every axis has size 1, no process
group exists, and each function of `collectives.py` is the identity.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron.flags import InputError, PassingFault, either
from megatron.parallel.config import ParallelConfig
from megatron.parallel.rendezvous import meet

# The axes and what a person calls them, the slowest first: neighbours in tp are neighbours in rank.
AXES = {"pp": "pipeline", "dp": "data-parallel", "cp": "context-parallel", "tp": "tensor-parallel"}


@dataclasses.dataclass
class Activity:
    """What this process is at, for the watchdog, whose thread reads what others write here.

    Attributes:
        steps: grows with every piece of work that is done.
        communication: which is waited for and among whom; None while there is none.
    """

    steps: int = 0
    communication: tuple[str, Axis] | None = None


@dataclasses.dataclass(frozen=True)
class Axis:
    """This process's place among the processes that differ from it in one coordinate alone.

    `group` is None where these are all processes of the run. `ranks` are theirs in the whole run. Communication over
    the axis is noted in `activity`.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    name: str = "whole run"
    ranks: tuple[int, ...] = (0,)
    activity: Activity = dataclasses.field(default_factory=Activity, compare=False, repr=False)


ALONE = Axis()


@dataclasses.dataclass(frozen=True)
class Mesh:
    """All processes of the run. `world` holds every process; the other axes split it.

    `ends` holds the first and the last stage of this process's pipeline, which keep tied embeddings equal; on
    other stages, and without a pipeline, it is of size 1. All axes of more than one process note what they do in
    `activity`.
    """

    device: torch.device
    world: Axis = ALONE
    pp: Axis = ALONE
    dp: Axis = ALONE
    cp: Axis = ALONE
    tp: Axis = ALONE
    ends: Axis = ALONE
    activity: Activity = dataclasses.field(default_factory=Activity, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the run: prints, logs and writes what one process writes."""
        return self.world.rank == 0


def rank_names(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-2, 5"; of many stretches the first ones."""
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in stretches]
    text = ", ".join(shown[:16]) + (", ..." if len(shown) > 16 else "")
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def choose_device(name: str) -> torch.device:
    """The device for `--device` `auto`, `cpu` or `cuda`: of several GPUs, the one of this local rank."""
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise InputError("--device: cuda was asked for, but torch sees no CUDA device; use --device cpu")
    local_rank = _environment("LOCAL_RANK", 0)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(f"torchrun started local rank {local_rank}, but this machine has {count} GPU(s)")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _environment(name: str, default: int | None = None) -> int:
    """A number that torchrun passes to the processes it starts."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise InputError(
            f"{name}: the environment has {text!r}, not a number; start the processes by torchrun"
        )
    return int(text)


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return _environment("WORLD_SIZE", 1)


def axis_sizes(config: ParallelConfig, processes: int) -> dict[str, int]:
    """Size of each axis.

    Raises:
        InputError: the processes do not divide into whole replicas of the model.
    """
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if processes % (tp * pp):
        below = processes // (tp * pp) * tp * pp
        raise InputError(
            f"--tensor-model-parallel-size {tp} times --pipeline-model-parallel-size {pp} needs a multiple of "
            f"{tp * pp} processes, and there {'is' if processes == 1 else 'are'} {processes}; start "
            f"{either(n for n in (below, below + tp * pp) if n)} with torchrun, or choose sizes whose product is "
            f"{either(n for n in range(1, processes + 1) if processes % n == 0)}"
        )
    return {"pp": pp, "dp": processes // (tp * pp), "cp": 1, "tp": tp}


@contextmanager
def init_mesh(
    config: ParallelConfig, device: torch.device, check: Callable[[Axis], None] = lambda world: None
) -> Iterator[Mesh]:
    """Join the processes that torchrun started into one mesh, for the length of a `with` block.

    Args:
        check: called with the axis of all processes before any other is made, which takes that they agree on a layout.

    Raises:
        InputError: the processes do not fit the layout, or the backend cannot serve the device.
    """
    processes = world_size()
    sizes = axis_sizes(config, processes)
    if processes == 1:
        yield Mesh(device=device)
        return
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise InputError("--distributed-backend: nccl needs GPUs; on CPUs use gloo")
    if backend == "gloo" and device.type == "cuda":
        _check_gloo_on_gpu(config)
    _environment("RANK")
    if not 0 < _environment("MASTER_PORT") < 2**16:
        raise InputError(
            f"MASTER_PORT: {os.environ['MASTER_PORT']} is not a port; it must be from 1 to 65535"
        )
    try:
        timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
        store, rank, _ = meet(timeout)
        dist.init_process_group(
            store=store,
            rank=rank,
            world_size=processes,
            # Small values that the host acts on travel over gloo, so that agreeing on them never waits for a GPU.
            backend="gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        everyone = tuple(range(processes))
        world = Axis(rank, processes, name="whole run", ranks=everyone)
        check(world)
        mesh = _arrange(sizes, device, world, timeout)
    except PassingFault:
        raise
    except RuntimeError as error:
        raise PassingFault(
            f"rank {os.environ['RANK']}: the {processes} processes did not come together within "
            f"--distributed-timeout-minutes {config.distributed_timeout_minutes}; see what the others say, or whether "
            f"MASTER_ADDR and MASTER_PORT lead to the first of them ({str(error).splitlines()[0][:200]})"
        ) from error
    yield mesh
    # Not where an exception ends the run: NCCL would wait for communications that a lost process never joins.
    dist.destroy_process_group()


@contextmanager
def fake_mesh(config: ParallelConfig, device: torch.device, *, rank: int, processes: int) -> Iterator[Mesh]:
    """The mesh that one process of a run would have, without the others, for the length of a `with` block.

    Communication over it is over at once, and leaves what it was to fill as it is.

    Raises:
        InputError: the processes do not fit the layout.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the backend, too

    sizes = axis_sizes(config, processes)
    if processes == 1:
        yield Mesh(device=device)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        world = Axis(rank, processes, name="whole run", ranks=tuple(range(processes)))
        yield _arrange(sizes, device, world, timeout=None)
    finally:
        dist.destroy_process_group()


def _check_gloo_on_gpu(config: ParallelConfig) -> None:
    """Gloo sums GPU tensors, but neither sends nor gathers them."""
    needs = {
        "--pipeline-model-parallel-size": config.pipeline_model_parallel_size > 1,
        "--sequence-parallel": config.sequence_parallel,
        "--use-distributed-optimizer": config.use_distributed_optimizer,
        "--distribute-saved-activations": config.distribute_saved_activations,
    }
    for name, given in needs.items():
        if given:
            raise InputError(f"--distributed-backend: gloo on GPUs cannot serve {name}; use nccl")


def _arrange(
    sizes: dict[str, int], device: torch.device, world: Axis, timeout: datetime.timedelta | None
) -> Mesh:
    """`timeout` is None where nothing is waited for."""
    layout = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    device_mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    place = [int(index) for index in (layout == world.rank).nonzero()[0]]
    axes = {}
    for dim, (name, size) in enumerate(sizes.items()):
        line: list = list(place)
        line[dim] = slice(None)
        ranks = tuple(layout[tuple(line)].tolist())
        group = device_mesh.get_group(name) if size > 1 else None
        if group is not None and timeout is not None:
            _set_pg_timeout(
                timeout, group
            )  # init_device_mesh takes none, and groups do not take that of the run
        axes[name] = Axis(place[dim], size, group, AXES[name], ranks, world.activity)
    ends = _ends(layout, axes["pp"], timeout)
    return Mesh(device=device, world=world, ends=ends, activity=world.activity, **axes)


def world_apart(world: Axis, config: ParallelConfig) -> Axis:
    """All processes of the run, over gloo connections of their own: for a thread, whose collectives must not mix with
    those of training. Every process must take part."""
    if world.size == 1:
        return world
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    group = dist.new_group(backend="gloo", timeout=timeout)
    # What the thread is at is not what the process is at.
    return dataclasses.replace(world, group=group, activity=Activity())


def _ends(layout: torch.Tensor, pp: Axis, timeout: datetime.timedelta | None) -> Axis:
    """The first and last stage of this process's pipeline, if it is one of them."""
    if pp.size == 1:
        return ALONE
    if pp.size == 2:
        return pp
    # Every process must take part in the making of every group.
    pipelines = layout.flatten(1).t().tolist()
    groups = {(line[0], line[-1]): dist.new_group([line[0], line[-1]], timeout) for line in pipelines}
    if pp.rank not in (0, pp.size - 1):
        return ALONE
    ranks = (pp.ranks[0], pp.ranks[-1])
    return Axis(int(pp.rank > 0), 2, groups[ranks], "pipeline's two ends", ranks, pp.activity)
