"""Flags that make a run faster without changing what it computes."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.flags import flag
from megatron.training.config import PluginConfig, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerformanceConfig(PluginConfig):
    """Threads, CUDA graphs, overlapped communication, saving in the background, and garbage collection in step."""

    num_threads: int | None = flag(
        None,
        "CPU threads of each process (default: OMP_NUM_THREADS, or one per core; torchrun sets it to 1)",
        low=1,
        high=10**4,
    )
    cuda_graph: bool = flag(
        False,
        "run forward and backward of a microbatch as one CUDA graph, which makes small models faster; for GPT with one "
        "GPU per replica and --attention-dropout 0",
    )
    tp_comm_overlap: bool = flag(
        False,
        "with tensor parallelism: divide the products of layers along the sequence, so that the communication of one "
        "piece overlaps with the product of the next, in forward",
    )
    async_save: bool = flag(
        False,
        "write checkpoints in the background, from a copy in host memory; the next save and the end of the run wait "
        "for the write",
    )
    manual_gc: bool = flag(
        False,
        "collect garbage at the same iteration on all ranks: at the start and every --manual-gc-interval",
    )
    manual_gc_interval: int = flag(
        0, "with --manual-gc: iterations between collections; 0: none after the start", low=0
    )
    manual_gc_eval: bool = flag(True, "with --manual-gc: do not collect before and after evaluations")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.manual_gc and (self.manual_gc_interval or not self.manual_gc_eval):
            given = "--manual-gc-interval" if self.manual_gc_interval else "--no-manual-gc-eval"
            raise InputError(f"{given} needs --manual-gc")

    def check(self, run: RunConfig) -> None:
        if self.tp_comm_overlap and run.parallel.tensor_model_parallel_size == 1:
            raise InputError("--tp-comm-overlap needs --tensor-model-parallel-size above 1")
        if self.async_save and run.checkpoint.save is None:
            raise InputError("--async-save needs --save, the folder to write checkpoints to")
