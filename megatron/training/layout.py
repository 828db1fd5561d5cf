"""Check that model and batch fit the layout of processes."""

from __future__ import annotations

from collections.abc import Callable

from megatron.errors import InputError
from megatron.flags import either
from megatron.model.config import check_expert_parallel, check_tensor_parallel
from megatron.parallel.mesh import axis_sizes
from megatron.parallel.stages import split_layers
from megatron.training.batch_size import BatchSchedule, make_batch_schedule
from megatron.training.config import RunConfig

# Checks of the batch sizes of a run, which raise `InputError`. Filled by `megatron.plugins`.
BATCH_CHECKS: list[Callable[[RunConfig, BatchSchedule], None]] = []


def check_layout(config: RunConfig, processes: int) -> None:
    """Check that model and batch can be split over `processes` as the flags say, before anything is built.

    Raises:
        InputError: names the flags, and the nearest sizes that fit.
    """
    model, parallel, seq_length = config.model, config.parallel, config.data.seq_length
    assert seq_length is not None  # required of a run
    check_expert_parallel(model, parallel, seq_length)
    sizes = axis_sizes(parallel, processes)
    parts, tp = 2 * sizes["cp"], sizes["tp"] if parallel.sequence_parallel else 1
    if sizes["cp"] > 1 and seq_length % (parts * tp):
        below = seq_length // (parts * tp) * parts * tp
        raise InputError(
            f"--context-parallel-size: {sizes['cp']} needs a --seq-length that {parts * tp} divides (2 chunks for each "
            f"rank{', split by --sequence-parallel' if tp > 1 else ''}), not {seq_length}; choose "
            f"{either(n for n in (below, below + parts * tp) if n)}"
        )
    also = {}
    if parallel.sequence_parallel:
        also[f"--seq-length {seq_length}, as --sequence-parallel needs"] = seq_length
    if parallel.distribute_saved_activations:
        hidden_size = model.hidden_size
        also[f"--hidden-size {hidden_size}, as --distribute-saved-activations needs"] = hidden_size
    check_tensor_parallel(model, parallel.tensor_model_parallel_size, processes // sizes["pp"], also)
    stages = split_layers(parallel, model.num_layers)
    largest = max(len(chunk.layers) for stage in stages for chunk in stage)
    if (parallel.recompute_num_layers or 0) > largest:
        raise InputError(
            f"--recompute-num-layers: {parallel.recompute_num_layers} is more than the {largest} layers that "
            f"a stage or chunk has at most; choose {largest} or less"
        )
    for section in config.plugins.values():
        section.check_processes(processes)
    batch_schedule = make_batch_schedule(config, sizes["dp"])
    for check in BATCH_CHECKS:
        check(config, batch_schedule)
