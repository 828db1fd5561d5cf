"""The processes of a run, arranged by what they share.

`torchrun` gives each process a rank and the number of processes; `init_mesh` arranges them on the axes
pp, dp, cp, tp (tp fastest, the order of Megatron-LM). With one process every axis has size 1, no process
group exists, and each function of `collectives.py` is the identity.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.flags import InputError
from megatron.parallel.config import ParallelConfig


@dataclasses.dataclass(frozen=True)
class Axis:
    """This process's place among the processes that differ from it in one coordinate alone.

    `group` is None where these are all processes of the run.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclasses.dataclass(frozen=True)
class Mesh:
    """All processes of the run. `world` holds every process; the other axes split it.

    Only the data-parallel axis can be larger than 1 so far.
    """

    device: torch.device
    world: Axis = Axis()
    pp: Axis = Axis()
    dp: Axis = Axis()
    cp: Axis = Axis()
    tp: Axis = Axis()

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the run: prints, logs and writes what one process writes."""
        return self.world.rank == 0


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


@contextmanager
def init_mesh(config: ParallelConfig, device: torch.device) -> Iterator[Mesh]:
    """Join the processes that torchrun started into one mesh, for the length of a `with` block.

    Raises:
        InputError: the backend cannot serve the device.
    """
    world_size = _environment("WORLD_SIZE", 1)
    if world_size == 1:
        yield Mesh(device=device)
        return
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise InputError("--distributed-backend: nccl needs GPUs; on CPUs use gloo")
    for name in ("RANK", "MASTER_PORT"):
        _environment(name)
    dist.init_process_group(
        # Small values that the host acts on travel over gloo, so that agreeing on them never waits for a GPU.
        backend="gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
        timeout=datetime.timedelta(minutes=config.distributed_timeout_minutes),
        device_id=device if backend == "nccl" else None,
    )
    try:
        # No group is named, which means all processes: a reference kept here would outlive the communication,
        # and gloo's threads abort a process that ends before they are joined.
        world = Axis(dist.get_rank(), world_size)
        yield Mesh(device=device, world=world, dp=world)
    finally:
        dist.destroy_process_group()
