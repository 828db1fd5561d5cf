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
    seq_length = config.data.seq_length
    assert seq_length is not None  # required of a run
    check_expert_parallel(config.model, config.parallel, seq_length // config.parallel.context_parallel_size)
    sizes = axis_sizes(config.parallel, processes)
    parts, tp = 2 * sizes["cp"], sizes["tp"] if config.parallel.sequence_parallel else 1
    if sizes["cp"] > 1 and seq_length % (parts * tp):
        below = seq_length // (parts * tp) * parts * tp
        raise InputError(
            f"--context-parallel-size: {sizes['cp']} needs a --seq-length that {parts * tp} divides (2 chunks for each "
            f"rank{', split by --sequence-parallel' if tp > 1 else ''}), not {seq_length}; choose "
            f"{either(n for n in (below, below + parts * tp) if n)}"
        )
    also = {}
    if config.parallel.sequence_parallel:
        also[f"--seq-length {config.data.seq_length}, as --sequence-parallel needs"] = config.data.seq_length
    if config.parallel.distribute_saved_activations:
        hidden_size = config.model.hidden_size
        also[f"--hidden-size {hidden_size}, as --distribute-saved-activations needs"] = hidden_size
    check_tensor_parallel(
        config.model, config.parallel.tensor_model_parallel_size, processes // sizes["pp"], also
    )
    largest = max(
        len(chunk.layers)
        for stage in split_layers(config.parallel, config.model.num_layers)
        for chunk in stage
    )
    if (config.parallel.recompute_num_layers or 0) > largest:
        raise InputError(
            f"--recompute-num-layers: {config.parallel.recompute_num_layers} is more than the {largest} layers that "
            f"a stage or chunk has at most; choose {largest} or less"
        )
    for section in config.plugins.values():
        section.check_processes(processes)
    batch_schedule = make_batch_schedule(config, sizes["dp"])
    for check in BATCH_CHECKS:
        check(config, batch_schedule)
