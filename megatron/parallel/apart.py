"""Process groups for threads that communicate while the run trains."""

from __future__ import annotations

import dataclasses
import datetime

import torch.distributed as dist

from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Heartbeat


def world_apart(world: Axis, config: ParallelConfig) -> Axis:
    """All processes of the run with their own gloo group, for a thread whose collectives must not mix with training's.

    Every process must take part.
    """
    if world.size == 1:
        return world
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    group = dist.new_group(backend="gloo", timeout=timeout)
    # A heartbeat of its own, since the thread's progress is not that of training.
    return dataclasses.replace(world, group=group, heartbeat=Heartbeat())
