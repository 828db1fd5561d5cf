"""A warning when other programs use the CPU that a run needs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron.training.loop import Hook, Trainer


class LoadWarning(Hook):
    """Warn at the start of a run on a CPU if the machine is busier than its cores, which makes every step slow."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if trainer.mesh.device.type == "cpu" and load > cores:
            trainer.log(
                f"warning: the load of this machine is {load:.1f} on {cores} cores, so this run will be slow; stop "
                f"other programs, or lower --num-threads, now {torch.get_num_threads()}"
            )
        return nullcontext()
