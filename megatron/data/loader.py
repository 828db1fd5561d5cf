"""Batches for one data-parallel replica, prepared ahead of need by worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron.data.config import DataConfig
from megatron.data.samplers import cyclic, sequential
from megatron.flags import InputError

# Token ids first, [samples, sequence]; then whatever else a task has.
Batch = dict[str, torch.Tensor]
# Often sent to a whole process group, but only the training process is to act on them, and it needs its workers
# until it has. Workers are forked with these blocked.
GROUP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def train_batches(
    dataset: Any,
    config: DataConfig,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int,
    eod: int | None,
    pin_memory: bool,
    ahead: int = 1,
) -> Iterator[Batch]:
    """Microbatches for training, from the first sample not yet consumed on.

    The batches do not depend on --num-workers.

    Args:
        dataset: samples by index, and how they become a batch (`stack` and `fields`, as those of GPTSamples).
        consumed_samples: by all replicas together.
        eod: id of the end-of-document token; may be None where no flag needs it.
        pin_memory: put the tensors in page-locked memory, from which a GPU can copy in the background. A thread
            does this.
        ahead: microbatches that are ready before they are asked for, if time allows: as many as are asked for at
            once. Without `pin_memory` this takes worker processes.

    Returns:
        An iterator over dicts of the data set's fields, each [micro_batch_size, ...]. Reading begins with this
        call.

    Raises:
        InputError: a sample cannot be read, or (--dataloader-type single) all have been consumed.
    """
    layout = {"micro_batch_size": micro_batch_size, "dp_rank": dp_rank, "dp_size": dp_size}
    if config.dataloader_type == "cyclic":
        order = cyclic(len(dataset), consumed=consumed_samples, **layout)
        return _load(dataset, config, order, eod, pin_memory, ahead)
    order = sequential(range(consumed_samples, len(dataset)), drop_last=True, **layout)
    return _endless(
        _load(dataset, config, order, eod, pin_memory, ahead),
        f"no samples left: the training data holds {len(dataset)}, this run began at sample {consumed_samples}, "
        f"and what remains is less than the {micro_batch_size * dp_size} of one microbatch on each of {dp_size} "
        "replicas; lower --train-iters or --train-samples, or give more data",
    )


def eval_batches(
    dataset: Any,
    config: DataConfig,
    *,
    samples: range,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    eod: int | None,
    pin_memory: bool,
) -> Iterator[Batch]:
    """One pass over `samples`, in order, for evaluation.

    Every replica gets equally many microbatches, and all together hold every sample once: the last one of a
    replica may be short, or empty. For the rest, as `train_batches`.

    Raises:
        InputError: a sample cannot be read, or the data set does not reach as far as `samples`.
    """
    if samples.stop > len(dataset):
        raise InputError(
            f"no samples left: samples {samples.start} to {samples.stop} are to be evaluated, "
            f"but the data holds {len(dataset)}; lower --eval-iters, or give more data"
        )
    order = sequential(
        samples, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size, drop_last=False
    )
    return _load(dataset, config, order, eod, pin_memory, ahead=1)


def start_fork_server(*imported: str) -> None:
    """Start the process that worker processes are forked from, if it does not run yet.

    The training process itself may run threads (of OpenMP, CUDA, NCCL) and so must not be forked. The server
    takes a second or so to import what workers need; called early, this happens beside other work.

    Args:
        imported: the modules that take longest of those that the running program imports. Each worker imports the
            program, without running it, so that for every evaluation it would import them again.
    """
    multiprocessing.set_forkserver_preload(["torch", __name__, "megatron.data.build", *imported])
    resource_tracker.ensure_running()  # else the server starts it, which would lift the block below
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _prepare_worker(_: int) -> None:
    """Make a worker process end when the training process does or says so, and at nothing else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # in case the server was started by someone else
    parent = multiprocessing.parent_process()

    def watch() -> None:
        # Torch's own watch is for the end of the process that forked this one, which is the server.
        while parent.is_alive():
            received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
            if received is not None and received.si_pid == parent.pid:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class _Reader:
    """Reads and stacks the samples of microbatches; the part of the work that is done in worker processes."""

    def __init__(self, dataset: Any, seq_length: int) -> None:
        self.dataset = dataset
        self.seq_length = seq_length

    def __getitem__(self, samples: Sequence[int]) -> Any:
        """The samples, stacked; or the error, which unlike a raised one arrives in one piece."""
        try:
            return self.dataset.stack([self.dataset[i] for i in samples], self.seq_length)
        except InputError as error:
            return error


def _load(
    dataset: Any,
    config: DataConfig,
    order: Iterable[Sequence[int]],
    eod: int | None,
    pin_memory: bool,
    ahead: int,
) -> Iterator[Batch]:
    """Start reading; the batches of the lists of samples in `order`."""
    parallel: dict[str, Any] = {}
    if config.num_workers > 0:
        start_fork_server()
        parallel = {
            "multiprocessing_context": "forkserver",
            "worker_init_fn": _prepare_worker,
            "prefetch_factor": max(2, -(-ahead // config.num_workers)),
        }
    loader = DataLoader(
        _Reader(dataset, config.seq_length),
        batch_size=None,
        sampler=order,
        num_workers=config.num_workers,
        collate_fn=_unchanged,
        # It draws from this; the random stream of the training is not to depend on how often it evaluates.
        generator=torch.Generator(),
        **parallel,
    )
    batches = _batches(iter(loader), lambda stacked: dataset.fields(stacked, eod, config), pin_memory)
    return _ahead(batches, ahead) if pin_memory else batches


def _unchanged(stacked: Any) -> Any:
    return stacked


def _batches(
    stacks: Iterator[Any], fields_of: Callable[[Any], dict[str, np.ndarray]], pin_memory: bool
) -> Generator[Batch, None, None]:
    try:
        for stacked in stacks:
            if isinstance(stacked, InputError):
                raise stacked
            fields = {name: torch.from_numpy(values) for name, values in fields_of(stacked).items()}
            yield {name: v.pin_memory() for name, v in fields.items()} if pin_memory else fields
    finally:
        # Ends the workers also while a traceback keeps this frame alive. Left to the garbage collector, which
        # closes the workers' queues before it tells them, they would be waited for in vain.
        del stacks


def _ahead(batches: Generator[Batch, None, None], count: int) -> Iterator[Batch]:
    """Have a thread prepare `count` batches while those before them are used."""
    thread = ThreadPoolExecutor(max_workers=1)
    with contextlib.closing(batches):
        try:
            upcoming = deque(thread.submit(next, batches, None) for _ in range(count))
            while (batch := upcoming.popleft().result()) is not None:
                upcoming.append(thread.submit(next, batches, None))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


def _endless(batches: Iterator[Batch], message: str) -> Iterator[Batch]:
    yield from batches
    raise InputError(message)
