"""Logits for generation, from a GPT split over the processes of a mesh.

The first process, the driver, sends commands to the others, its workers, and gets the logits. Everything that decides
about tokens runs in the driver and does not depend on the layout.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.inference.kv_cache import KVCache
from megatron.inference.stages import Stages
from megatron.model.gpt import GPTModel
from megatron.parallel.apart import world_apart
from megatron.parallel.collectives import all_reduce_max, broadcast
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Mesh

FORWARD, COPY, CLEAR, RESERVE, STOP = range(5)
# A server may be idle between two commands for any time.
NO_TIMEOUT = ParallelConfig(distributed_timeout_minutes=10**6)


class NonFiniteLogits(InputError):
    """The model computed NaN or infinity."""

    def __init__(self) -> None:
        super().__init__("--load: the model's logits are not finite; if --dtype is fp16, try bf16 or fp32")


class Predictor:
    """A GPT with a key/value cache for several sequences. Each process creates one; all but the first call
    `run_worker`."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        mesh: Mesh,
        *,
        origin: str = "",
        commands: Axis | None = None,
        index: int = 0,
    ) -> None:
        """Every process must take part unless `commands` is given.

        Args:
            chunks: of the model, on this process.
            origin: the directory of the weights, for provenance records.
            commands: the processes of `mesh` with a gloo group; None makes one without a timeout.
            index: of the predictor among those that share `commands`.
        """
        self.origin = origin
        self.stages, self.mesh = Stages(chunks, mesh), mesh
        self.vocab_size, self.context = self.stages.vocab_size, self.stages.config.max_position_embeddings
        self.commands, self.index = commands or world_apart(mesh.world, NO_TIMEOUT), index
        self.rows = self.length = 0
        self.cache: KVCache | None = None

    def reserve(self, rows: int, length: int) -> None:
        """Allocate a cache for `rows` sequences of `length` tokens; replaces the old cache.

        Raises:
            InputError: a process has too little memory.
        """
        with self._command(RESERVE, [rows, length]):
            self._reserve(rows, length)

    def _reserve(self, rows: int, length: int) -> None:
        self.rows, self.length, self.cache = rows, length, None  # free the old cache first
        config, device = self.stages.config, self.mesh.device
        layers = [int(number) for chunk in self.stages.chunks for number in chunk.decoder.layers]
        # On a CPU attention of one query over fp32 keys is 2.5 times as fast as over bf16 (benchmarks/README.md).
        dtype = torch.float32 if device.type == "cpu" else self.stages.dtype
        failed = torch.tensor([0])
        try:
            self.cache = KVCache(
                config, layers, self.mesh.tp, rows=rows, length=length, dtype=dtype, device=device
            )
        except RuntimeError:
            failed += 1
        if all_reduce_max(failed, self.commands):
            self.cache = None
            raise InputError(
                f"not enough {device.type} memory for the key/value cache of {rows} texts of {length} tokens; reduce "
                "either"
            )

    def forward(
        self,
        first: int,
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        all_positions: bool = False,
    ) -> Tensor:
        """Append `tokens[i]` to the sequence in row `first` + i, at positions `starts[i]` and following.

        Returns:
            Logits [n, v] in fp32 on the CPU, at the last token of each sequence or at `all_positions`.
        """
        lengths = [len(row) for row in tokens]
        padded = [[*row, *[0] * (max(lengths) - len(row))] for row in tokens]
        content = [first, all_positions, len(tokens), *starts, *lengths, *itertools.chain(*padded)]
        with self._command(FORWARD, content):
            return self._forward(first, starts, lengths, padded, all_positions)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`, all at once."""
        with self._command(COPY, [length, *sources, *targets]):
            self._copy(sources, targets, length)

    def _copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        assert self.cache is not None
        self.cache.copy(sources, targets, length)

    def clear(self, row: int) -> None:
        """Zero a row of the cache. Attention multiplies masked positions by 0, but 0 x NaN is NaN."""
        with self._command(CLEAR, [row]):
            self._clear(row)

    def _clear(self, row: int) -> None:
        assert self.cache is not None
        self.cache.clear(row)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Stop the workers at the end of the block, even after an exception."""
        try:
            yield
        finally:
            with self._command(STOP, []):
                pass

    def execute(self, kind: int, content: list[int]) -> None:
        """Execute a command of the driver."""
        if kind == RESERVE:
            with suppress(InputError):  # the driver reports it, and may continue
                self._reserve(*content)
        elif kind == COPY:
            length, *rows = content
            self._copy(rows[: len(rows) // 2], rows[len(rows) // 2 :], length)
        elif kind == CLEAR:
            self._clear(*content)
        else:
            first, all_positions, b, *rest = content
            starts, lengths, flat = rest[:b], rest[b : 2 * b], rest[2 * b :]
            s = len(flat) // b
            padded = [flat[i * s : (i + 1) * s] for i in range(b)]
            self._forward(first, starts, lengths, padded, bool(all_positions))

    @contextmanager
    def _command(self, kind: int, content: list[int]) -> Iterator[None]:
        """Send a command to the workers; the driver executes it in the block."""
        if self.mesh.world.size == 1:
            yield
            return
        with _defer_interrupt():
            broadcast(torch.tensor([kind, self.index, len(content)]), self.commands)
            if content:
                broadcast(torch.tensor(content), self.commands)
            yield

    def _forward(
        self,
        first: int,
        starts: Sequence[int],
        lengths: Sequence[int],
        padded: Sequence[Sequence[int]],
        all_positions: bool,
    ) -> Tensor:
        assert self.cache is not None
        device, pp = self.mesh.device, self.mesh.pp
        rows = self.cache.rows(first, starts, lengths)
        if all_positions:
            positions = [(row, i) for row, length in enumerate(lengths) for i in range(length)]
        else:
            positions = [(row, length - 1) for row, length in enumerate(lengths)]
        logit_positions = tuple(
            torch.tensor(numbers, device=device) for numbers in zip(*positions, strict=True)
        )
        tokens = torch.tensor(padded, device=device)
        logits = self.stages(tokens, rows.position_ids_bs, cache=rows, logit_positions=logit_positions)
        if logits is not None:
            logits = self.stages.whole_vocabulary(logits)
        if pp.size > 1 and self.mesh.tp.rank == 0:
            if self.stages.is_last:
                assert logits is not None
                self.stages.transfers.send(logits, 0)
            elif pp.rank == 0:
                shape = (len(positions), self.vocab_size)
                logits = self.stages.transfers.receive(shape, torch.float32, pp.size - 1)()
        self.stages.transfers.finish()
        if not self.mesh.is_first:
            return torch.empty(0)
        assert logits is not None
        return logits.cpu()


def run_worker(predictors: Sequence[Predictor]) -> None:
    """Execute the driver's commands until it stops. `predictors` share their `commands`."""
    axis = predictors[0].commands
    while True:
        kind, index, count = broadcast(torch.empty(3, dtype=torch.int64), axis).tolist()
        if kind == STOP:
            return
        content = broadcast(torch.empty(count, dtype=torch.int64), axis).tolist()
        predictors[index].execute(kind, content)


def check_prompt(prompt: Sequence[int], length: int) -> None:
    """Raise `InputError` if a prompt is empty, or leaves no room for another token in `length`."""
    if not prompt:
        raise InputError("the prompt is empty; it needs at least one token")
    if len(prompt) >= length:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and leaves no room in the context of {length}; shorten it"
        )


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, so that workers do not wait for an incomplete command."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    caught: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        signal.raise_signal(signal.SIGINT)
