"""The mesh of processes: the axes of parallelism and their process groups.

`torchrun` gives each process a rank and the number of processes; `init_mesh` arranges them on the axes pp, dp, cp, tp
(tp fastest, the order of Megatron-LM). With one process every axis has size 1, there is no process group, and each
function of `collectives.py` is the identity.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.errors import InputError, TransientFault
from megatron.flags import either
from megatron.parallel.config import ParallelConfig
from megatron.parallel.rendezvous import meet

# Exists where NVIDIA's driver is loaded.
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
# Axes and their names in messages, slowest first: neighbors in tp are neighbors in rank.
AXES = {"pp": "pipeline", "dp": "data-parallel", "cp": "context-parallel", "tp": "tensor-parallel"}


@dataclasses.dataclass
class Heartbeat:
    """Progress of this process, which the watchdog's thread reads.

    Attributes:
        steps: counter of completed pieces of work.
        communication: name and axis of the communication in progress; None if there is none.
    """

    steps: int = 0
    communication: tuple[str, Axis] | None = None


@dataclasses.dataclass(frozen=True)
class Axis:
    """One dimension of the mesh, as seen from this process.

    It consists of this process and the processes that differ from it only in this coordinate.

    Attributes:
        rank: index of this process on the axis.
        size: number of processes. Collectives over size 1 do nothing.
        group: process group. For size > 1, None means the default group; unused for size 1.
        name: name in messages.
        ranks: global ranks of the processes.
        heartbeat: records communication over the axis.
        parts: with --num-distributed-optimizer-instances, the ranks of this rank's instance, among which it shards, and
            those of all instances that have the same shard.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    name: str = "whole run"
    ranks: Sequence[int] = (0,)
    heartbeat: Heartbeat = dataclasses.field(default_factory=Heartbeat, compare=False, repr=False)
    parts: tuple[Axis, Axis] | None = None

    def local_range(self, total: int) -> tuple[int, int]:
        """Begin and end of this rank's equal part of `total` rows, a multiple of `size`."""
        each = total // self.size
        return self.rank * each, (self.rank + 1) * each


ALONE = Axis()


@dataclasses.dataclass(frozen=True)
class Mesh:
    """All processes of the run.

    Attributes:
        world: every process. The other axes are parts of it. Its group, for tensors of the host, is gloo's.
        pp: stages of this process's pipeline.
        dp: processes that read different samples.
        cp: processes that divide each sequence (`data/zigzag.py`).
        dp_cp: processes that hold the same dense parameters and sum their gradients: those of `dp` and `cp`.
        tp: processes that split the layers of this stage.
        tp_cp: processes that hold the parts of a sequence where `tp` divides it too.
        expert: processes that divide the experts of this stage, and the features of each.
        expert_dp: processes that hold the same part of the experts.
        embedding: first and last pipeline stage, which keep tied embeddings equal; of size 1 on other stages and
            without a pipeline.
        heartbeat: records communication over all axes.
        timeout: --distributed-timeout-minutes; None without other processes.
        backend: communication library of the axes; None for that of `world`.
    """

    device: torch.device
    world: Axis = ALONE
    pp: Axis = ALONE
    dp: Axis = ALONE
    cp: Axis = ALONE
    dp_cp: Axis = ALONE
    tp: Axis = ALONE
    tp_cp: Axis = ALONE
    expert: Axis = ALONE
    expert_dp: Axis = ALONE
    embedding: Axis = ALONE
    heartbeat: Heartbeat = dataclasses.field(default_factory=Heartbeat, compare=False)
    timeout: datetime.timedelta | None = None
    backend: str | None = None

    @property
    def is_first(self) -> bool:
        """True on the process that logs and writes for all."""
        return self.world.rank == 0


def choose_device(name: str) -> torch.device:
    """Device for --device auto, cpu or cuda; on a GPU machine, the GPU numbered LOCAL_RANK."""
    available = torch.cuda.is_available()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if name == "auto" and not available and not hidden and torch.version.cuda and NVIDIA_GPUS.is_dir():
        raise InputError(
            "--device auto: this machine has an NVIDIA GPU, but torch cannot use it; check the driver "
            f"(torch is built for CUDA {torch.version.cuda}), or use --device cpu"
        )
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise InputError("--device cuda: torch finds no CUDA device; use --device cpu")
    local_rank, count = _environment("LOCAL_RANK", 0), torch.cuda.device_count()
    if count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local_rank = 0  # SLURM's --gpus-per-task shows each process its own GPU only
    if local_rank >= count:
        raise InputError(f"torchrun started local rank {local_rank}, but this machine has {count} GPU(s)")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _environment(name: str, default: int | None = None) -> int:
    """Read a number that torchrun passes to its processes."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise InputError(
            f"{name}: {text!r} in the environment is not a number; start the processes with torchrun"
        )
    return int(text)


def world_size() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return _environment("WORLD_SIZE", 1)


def axis_sizes(config: ParallelConfig, processes: int) -> dict[str, int]:
    """Sizes of the axes.

    Raises:
        InputError: the processes do not divide into whole model replicas.
    """
    tp, pp, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    if processes % (replica := tp * pp * cp):
        below, context = processes // replica * replica, f" x --context-parallel-size {cp}" if cp > 1 else ""
        raise InputError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}{context} needs a multiple of "
            f"{replica} processes, and there {'is' if processes == 1 else 'are'} {processes}; start "
            f"{either(n for n in (below, below + replica) if n)} with torchrun, or choose sizes whose product is "
            f"{either(n for n in range(1, processes + 1) if processes % n == 0)}"
        )
    if processes // pp % config.expert_size:
        raise InputError(
            f"--expert-model-parallel-size {config.expert_model_parallel_size} x --expert-tensor-parallel-size "
            f"{config.expert_tp} does not divide the {processes // pp} processes of a pipeline stage; choose sizes "
            f"whose product is {either(n for n in range(1, processes // pp + 1) if processes // pp % n == 0)}"
        )
    instances = config.num_distributed_optimizer_instances
    replicas = {"data- and context-parallel": processes // (tp * pp)}
    replicas["expert-data-parallel"] = processes // pp // config.expert_size
    for name, ranks in replicas.items():
        if ranks % instances:
            raise InputError(
                f"--num-distributed-optimizer-instances: {instances} does not divide the {ranks} {name} ranks; use "
                f"{either(n for n in range(1, ranks + 1) if all(r % n == 0 for r in replicas.values()))}"
            )
    return {"pp": pp, "dp": processes // replica, "cp": cp, "tp": tp}


@contextmanager
def init_mesh(
    config: ParallelConfig, device: torch.device, check: Callable[[Axis], None] = lambda world: None
) -> Iterator[Mesh]:
    """Context in which the processes that torchrun started are joined in a mesh.

    Args:
        check: called with the axis of all processes before the others are made, since that requires the same layout on
            all ranks.

    Raises:
        InputError: the processes do not fit the layout, or the backend does not support the device.
        TransientFault: not all processes joined in time.
    """
    processes = world_size()
    sizes = axis_sizes(config, processes)
    if processes == 1:
        yield Mesh(device=device)
        return
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise InputError("--distributed-backend: nccl needs GPUs; on CPUs use gloo")
    rank = _environment("RANK")
    host, port = os.environ.get("MASTER_ADDR", ""), _environment("MASTER_PORT")
    if not host or not 0 < port < 2**16:
        raise InputError(f"MASTER_ADDR {host!r}, MASTER_PORT {port}: not a host and a port from 1 to 65535")
    try:
        timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # gloo connects two ranks when they communicate
        dist.init_process_group(
            store=meet(rank, processes, (host, port), timeout),
            rank=rank,
            world_size=processes,
            backend="gloo",
            timeout=timeout,
        )
        world = Axis(rank, processes, ranks=range(processes))
        check(world)
        alone = Mesh(device, world, heartbeat=world.heartbeat, timeout=timeout, backend=backend)
        mesh = arrange(sizes, alone, config)
    except TransientFault:
        raise
    except RuntimeError as error:
        raise TransientFault(
            f"rank {rank}: the {processes} processes did not all join within "
            f"--distributed-timeout-minutes {config.distributed_timeout_minutes}; see the messages of the others, and "
            f"check that MASTER_ADDR and MASTER_PORT reach rank 0 ({str(error).splitlines()[0][:200]})"
        ) from error
    yield mesh
    # In one order on all ranks, as NCCL needs. Not after an exception, since it would wait for a rank that is lost.
    axes = [part for axis in (mesh.expert_dp, mesh.dp_cp) for part in axis.parts or ()]
    axes += (mesh.embedding, mesh.expert, mesh.expert_dp, mesh.tp_cp, mesh.dp_cp)
    axes += (mesh.tp, mesh.cp, mesh.dp, mesh.pp)
    for group in filter(None, dict.fromkeys(axis.group for axis in axes)):
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def arrange(sizes: dict[str, int], mesh: Mesh, config: ParallelConfig) -> Mesh:
    """Make the axes of a mesh that has only `world`."""
    axes, stride = {}, 1
    for name, size in reversed(sizes.items()):
        first = mesh.world.rank - mesh.world.rank // stride % size * stride
        axes[name] = join(range(first, first + size * stride, stride), AXES[name], mesh)
        stride *= size
    pp, dp, cp, tp = (axes[name] for name in AXES)
    begin, first = (mesh.world.rank // n * n for n in (dp.size * cp.size * tp.size, cp.size * tp.size))
    dp_cp, tp_cp = dp, tp
    if cp.size > 1:
        replicas = range(begin + tp.rank, begin + dp.size * cp.size * tp.size, tp.size)
        dp_cp = joined(replicas, "data- and context-parallel", mesh, cp)
        tp_cp = joined(range(first, first + cp.size * tp.size), "tensor- and context-parallel", mesh, cp)
    embedding = pp if pp.size == 2 else ALONE
    if pp.size > 2:
        # Middle stages make a group each: torch names later groups by the number before them, which must agree.
        ends = (pp.ranks[0], pp.ranks[-1]) if pp.rank in (0, pp.size - 1) else (mesh.world.rank,)
        embedding = join(ends, "embedding", mesh, least=1)
    dp_cp = divide(dp_cp, config.num_distributed_optimizer_instances, mesh)
    mesh = dataclasses.replace(
        mesh, pp=pp, dp=dp, cp=cp, dp_cp=dp_cp, tp=tp, tp_cp=tp_cp, embedding=embedding
    )
    if (expert_size := config.expert_size) == tp.size:  # the experts are divided as the other layers are
        return dataclasses.replace(mesh, expert=tp, expert_dp=dp_cp)
    # Neighbors among the processes of the stage divide the experts, whatever they are to the other layers.
    stage = dp_cp.size * tp.size
    place, copy = (mesh.world.rank - begin) % expert_size, (mesh.world.rank - begin) // expert_size
    experts = range(begin + copy * expert_size, begin + (copy + 1) * expert_size)
    replicas = range(begin + place, begin + stage, expert_size)
    expert_dp = join(replicas, "expert-data-parallel", mesh)
    expert_dp = divide(expert_dp, config.num_distributed_optimizer_instances, mesh)
    return dataclasses.replace(mesh, expert=join(experts, "expert-parallel", mesh), expert_dp=expert_dp)


def divide(axis: Axis, instances: int, mesh: Mesh) -> Axis:
    """Give an axis its `parts`: so many instances of neighbors."""
    if instances == 1:
        return axis
    size = axis.size // instances
    begin, within = axis.rank // size * size, axis.rank % size
    shards = join(axis.ranks[begin : begin + size], f"{axis.name} shard", mesh)
    same = joined(axis.ranks[within::size], f"{axis.name} instance", mesh, axis)
    return dataclasses.replace(axis, parts=(shards, same))


def joined(ranks: Sequence[int], name: str, mesh: Mesh, axis: Axis) -> Axis:
    """Make an axis of `ranks`, or give `axis` another name if it has the same ones."""
    same = len(ranks) == axis.size
    return dataclasses.replace(axis, name=name) if same else join(ranks, name, mesh)


def join(ranks: Sequence[int], name: str, mesh: Mesh, *, least: int = 2) -> Axis:
    """Make an axis of this process and others, and a group of `least` or more. Only these take part."""
    group, world, nccl = None, mesh.world, mesh.backend == "nccl"
    if len(ranks) >= least and (nccl or len(ranks) < world.size):
        device = mesh.device if nccl else None  # with it NCCL connects here, and not in the first step
        group = dist.new_group(
            list(ranks), mesh.timeout, mesh.backend, use_local_synchronization=True, device_id=device
        )
    return Axis(ranks.index(world.rank), len(ranks), group, name, ranks, world.heartbeat)
