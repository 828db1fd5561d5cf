"""Batches for one data-parallel replica, prefetched by worker processes."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from megatron.data.batch import Batch
from megatron.data.config import DataConfig
from megatron.data.dataset import Dataset
from megatron.data.samplers import SAMPLE_ORDERS, sequential
from megatron.errors import InputError, TransientFault

# These signals often reach the whole process group, but only the training process acts on them, and it needs its
# workers until it is done. Workers are forked with the signals blocked.
GROUP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


def train_batches(
    dataset: Dataset,
    config: DataConfig,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int,
    pin_memory: bool,
    ahead: int = 1,
) -> Iterator[Batch]:
    """Return the training microbatches from the first unconsumed sample on. Reading starts with this call.

    The batches do not depend on --num-workers.

    Args:
        consumed_samples: samples consumed so far by all replicas together.
        pin_memory: have a thread put the tensors in pinned memory, for asynchronous copies to a GPU.
        ahead: microbatches to prefetch, the number that a step takes at once. Without `pin_memory`, prefetching needs
            worker processes.

    Raises:
        InputError: a sample cannot be read, or (--dataloader-type single) no samples are left.
    """
    layout = {"micro_batch_size": micro_batch_size, "dp_rank": dp_rank, "dp_size": dp_size}
    order = SAMPLE_ORDERS[config.dataloader_type](len(dataset), consumed=consumed_samples, **layout)
    return _endless(
        _load(dataset, config, order, pin_memory, ahead),
        f"no samples left: the training data has {len(dataset)}, this run started at sample {consumed_samples}, and "
        f"fewer than the {micro_batch_size * dp_size} of one microbatch on each of {dp_size} replicas remain; "
        "lower --train-iters or --train-samples, or give more data",
    )


def eval_batches(
    dataset: Dataset,
    config: DataConfig,
    *,
    samples: range,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Return the microbatches of one pass over `samples`, in order, for evaluation.

    Every replica gets the same number of microbatches, and together they contain every sample once, so the last
    microbatch of a replica may be short or empty. The other arguments are those of `train_batches`.

    Raises:
        InputError: a sample cannot be read, or the dataset has too few samples.
    """
    if samples.stop > len(dataset):
        raise InputError(
            f"no samples left: evaluation needs samples {samples.start} to {samples.stop}, but the data has "
            f"{len(dataset)}; lower --eval-iters, or give more data"
        )
    order = sequential(
        samples, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size, drop_last=False
    )
    return _load(dataset, config, order, pin_memory, ahead=1)


def start_fork_server(*imported: str) -> None:
    """Start the fork server, from which worker processes are forked, unless it runs already.

    The training process itself may have threads (OpenMP, CUDA, NCCL), so it must not be forked. The server takes about
    a second to import the modules that workers need; if started early, it does so in parallel with other work.

    Args:
        imported: further modules to preload, the slowest imports of the running program. Each worker imports the
            program, without running it, and would otherwise import them again for every evaluation.
    """
    multiprocessing.set_forkserver_preload(["torch", __name__, "megatron.data.build", *imported])
    resource_tracker.ensure_running()  # otherwise the server starts it, which would unblock the signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _prepare_worker(_: int) -> None:
    """Make a worker process end only when the training process ends or terminates it."""
    faulthandler.enable()  # prints where a signal such as SIGBUS ends it
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # in case other code started the server
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        # Torch's own watchdog watches the process that forked this one, which is the server.
        while parent.is_alive():
            received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
            if received is not None and received.si_pid == parent.pid:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class _Reader(TorchDataset[Any]):
    """Map-style dataset of microbatches: reads and collates their samples, in a worker process."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, samples: Sequence[int]) -> Batch | InputError:
        """Return a batch, or the InputError. A raised one would arrive as another exception type."""
        try:
            return self.dataset.collate([self.dataset[i] for i in samples])
        except InputError as error:
            return error


def _load(
    dataset: Dataset,
    config: DataConfig,
    order: Iterable[Sequence[int]],
    pin_memory: bool,
    ahead: int,
) -> Iterator[Batch]:
    """Start reading the batches, one for each list of samples in `order`."""
    workers: dict[str, Any] = {}
    if config.num_workers > 0:
        start_fork_server()
        workers = {
            "multiprocessing_context": "forkserver",
            "worker_init_fn": _prepare_worker,
            "prefetch_factor": max(2, -(-ahead // config.num_workers)),
        }
    loader: DataLoader[Any] = DataLoader(
        _Reader(dataset),
        batch_size=None,
        sampler=order,
        num_workers=config.num_workers,
        # The loader draws a seed. The global random stream must not depend on how often a run evaluates.
        generator=torch.Generator(),
        **workers,
    )
    batches = _batches(iter(loader), dataset, pin_memory)
    return _ahead(batches, ahead) if pin_memory else batches


def _batches(
    loaded: Iterator[Batch | InputError], dataset: Dataset, pin_memory: bool
) -> Generator[Batch, None, None]:
    try:
        for batch in loaded:
            if isinstance(batch, InputError):
                raise batch
            yield batch.pin_memory() if pin_memory else batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        copy.deepcopy(dataset)  # maps its files again: raises InputError if one was truncated (SIGBUS)
        why = f"{error}; if memory ran out, lower --num-workers"
        raise TransientFault(f"a process that reads data has died: {why}") from error
    finally:
        # End the workers even while a traceback keeps this frame alive. The garbage collector would close the
        # workers' queues before it notifies them, and then wait for them forever.
        del loaded


def _ahead(batches: Generator[Batch, None, None], count: int) -> Iterator[Batch]:
    """Prefetch `count` batches in a thread."""
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
