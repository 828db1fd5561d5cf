"""Layouts of a verified run: sizes of the axes, and flags that depend on them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.parallel.config import ParallelConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the axes.

    Attributes:
        ep, etp: expert-parallel and expert-tensor-parallel size; `etp` is None if it is `tp`.
        cp: context-parallel size.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    def __post_init__(self) -> None:
        if self.etp == self.tp:
            object.__setattr__(self, "etp", None)

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        sizes = {"t": self.tp, "c": self.cp, "p": self.pp, "d": self.dp, "e": self.ep}
        name = "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        return name + (f"et{self.etp}" if self.etp else "") or "one process"

    @classmethod
    def from_config(cls, config: ParallelConfig, processes: int) -> Layout:
        """Layout of a run of a number of processes."""
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        cp, ep = config.context_parallel_size, config.expert_model_parallel_size
        return cls(tp, pp, processes // (tp * pp * cp), ep, config.expert_tp, cp)

    def flags(self) -> dict[str, Any]:
        """Values of `ParallelConfig`."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }


def fitted_layout(layout: Layout, most: int, *, replicas: int = 2) -> Layout:
    """Divide the largest size until a replica fits. So many replicas remain if they fit, at least two."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp or 1}

    def stage() -> int:
        """Ranks of a stage that hold all of its layers, those of its experts too."""
        return math.lcm(
            sizes["tp"] * sizes["cp"], sizes["ep"] * (sizes["etp"] if layout.etp else sizes["tp"])
        )

    while stage() * sizes["pp"] > most:
        axis = max(sizes, key=sizes.__getitem__)
        size = sizes[axis]
        sizes[axis] //= next(n for n in range(2, size + 1) if size % n == 0)
    ranks = stage()
    held = math.lcm(layout.tp * layout.cp, layout.ep * (layout.etp or layout.tp))
    for copies in (2, replicas):
        if layout.tp * layout.cp * layout.dp >= copies * held and copies * stage() * sizes["pp"] <= most:
            ranks = copies * stage()
    if layout.etp is None:
        del sizes["etp"]
    return Layout(**sizes, dp=ranks // (sizes["tp"] * sizes["cp"]))


def optimizer_instances(parallel: ParallelConfig, layout: Layout) -> dict[str, Any]:
    """Values of `ParallelConfig` for another number of replicas, which the instances must divide."""
    ranks = layout.dp * layout.cp * layout.tp
    replicas = math.gcd(ranks // layout.tp, ranks // (layout.ep * (layout.etp or layout.tp)))
    return {
        "num_distributed_optimizer_instances": math.gcd(
            parallel.num_distributed_optimizer_instances, replicas
        )
    }


def context_communication(parallel: ParallelConfig, layout: Layout) -> dict[str, Any]:
    """Values of `ParallelConfig` for another context-parallel size."""
    if layout.cp == parallel.context_parallel_size:
        return {}
    comm_type, sizes = parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes
    if sizes is not None and layout.cp % 2 == 0 and layout.cp > 2:
        sizes = (2, layout.cp // 2)
    elif sizes is not None:
        comm_type, sizes = "p2p", None
    return {"cp_comm_type": comm_type, "hierarchical_context_parallel_sizes": sizes}


def one_stage() -> dict[str, Any]:
    """Values of `ParallelConfig` without a pipeline."""
    return {
        "pipeline_model_parallel_size": 1,
        "pipeline_schedule": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
