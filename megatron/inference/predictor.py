"""Logits of sequences that grow, from a GPT whose parts the processes of a mesh hold.

The first process says what is computed, and gets the logits; the others follow. So whatever decides on tokens, requests
that come and go and people who type, is in one process alone and knows nothing of the layout.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from megatron.flags import InputError
from megatron.inference.stages import Stages
from megatron.model.gpt import GPTModel
from megatron.model.transformer import KVCache
from megatron.parallel.collectives import all_reduce_max, broadcast
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh, world_apart

FORWARD, COPY, RESERVE, STOP = range(4)
# Between two commands may lie the night.
PATIENCE = ParallelConfig(distributed_timeout_minutes=10**6)


class Predictor:
    """A GPT, and a cache with room for some sequences. Every process must make one, and all but the first `follow`."""

    def __init__(self, model: GPTModel, mesh: Mesh, *, origin: str = "") -> None:
        """`origin`: the folder that the weights are from, for those who note what made a text."""
        self.origin = origin
        self.vocab_size, self.context = model.vocab_size, model.config.max_position_embeddings
        self.stages, self.mesh = Stages(model, mesh), mesh
        self.commands = world_apart(mesh.world, PATIENCE)
        self.rows = self.length = 0

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `length` tokens of each of `rows` sequences, in place of what there was.

        Raises:
            InputError: a process has too little memory.
        """
        with self._command(RESERVE, [rows, length]):
            self._reserve(rows, length)

    def _reserve(self, rows: int, length: int) -> None:
        self.rows, self.length, self.cache = rows, length, None  # what there was goes first
        config, device = self.stages.config, self.mesh.device
        layers = [int(number) for number in self.stages.model.decoder.layers]
        here = range(layers[0], layers[-1] + 1)
        # A CPU attends by one query to keys in fp32 2.5 times as fast as to keys in bf16 (benchmarks/README.md).
        dtype = torch.float32 if device.type == "cpu" else self.stages.dtype
        failed = torch.tensor([0])
        try:
            self.cache = KVCache(
                config, here, self.mesh.tp, rows=rows, length=length, dtype=dtype, device=device
            )
        except RuntimeError:
            failed += 1
        if all_reduce_max(failed, self.commands):
            self.cache = None
            raise InputError(
                f"there is too little memory on {device.type} for the keys and values of {rows} texts of {length} "
                "tokens; take fewer, or shorter ones"
            )

    def forward(
        self, first: int, starts: Sequence[int], tokens: Sequence[Sequence[int]], *, every: bool = False
    ) -> Tensor:
        """Let the sequences from row `first` on grow, that of `tokens[i]` from position `starts[i]` on.

        Returns:
            Logits [n, v] in fp32 on the CPU: of what follows on the last token of each sequence, or on `every` token.

        Raises:
            InputError: they are not finite.
        """
        lengths = [len(row) for row in tokens]
        padded = [[*row, *[0] * (max(lengths) - len(row))] for row in tokens]
        content = [first, every, len(tokens), *starts, *lengths, *itertools.chain(*padded)]
        with self._command(FORWARD, content):
            logits_nv = self._forward(first, starts, lengths, padded, every)
        if not logits_nv.sum().isfinite():
            raise InputError(
                "--load: the model gives logits that are not finite; if --dtype fp16 is too narrow for it, take bf16 "
                "or fp32"
            )
        return logits_nv

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Make the first `length` tokens of the rows `targets` those of the rows `sources`, all at once."""
        with self._command(COPY, [length, *sources, *targets]):
            self.cache.copy(sources, targets, length)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """A block after which the other processes follow no more, however it ends."""
        try:
            yield
        finally:
            with self._command(STOP, []):
                pass

    def follow(self) -> None:
        """Do what the first process says, until it says no more."""
        while True:
            kind, count = broadcast(torch.empty(2, dtype=torch.int64), self.commands).tolist()
            if kind == STOP:
                return
            content = broadcast(torch.empty(count, dtype=torch.int64), self.commands).tolist()
            if kind == RESERVE:
                with suppress(InputError):  # which the first process says, and may go on after
                    self._reserve(*content)
            elif kind == COPY:
                length, *rows = content
                self.cache.copy(rows[: len(rows) // 2], rows[len(rows) // 2 :], length)
            else:
                first, every, b, *rest = content
                starts, lengths, flat = rest[:b], rest[b : 2 * b], rest[2 * b :]
                s = len(flat) // b
                padded = [flat[i * s : (i + 1) * s] for i in range(b)]
                self._forward(first, starts, lengths, padded, bool(every))

    @contextmanager
    def _command(self, kind: int, content: list[int]) -> Iterator[None]:
        """Tell the other processes what to do, and do the same in the block."""
        if self.mesh.world.size == 1:
            yield
            return
        with _whole():
            broadcast(torch.tensor([kind, len(content)]), self.commands)
            if content:
                broadcast(torch.tensor(content), self.commands)
            yield

    def _forward(
        self,
        first: int,
        starts: Sequence[int],
        lengths: Sequence[int],
        padded: Sequence[Sequence[int]],
        every: bool,
    ) -> Tensor:
        device, pp = self.mesh.device, self.mesh.pp
        rows = self.cache.rows(first, starts, len(padded[0]))
        if every:
            places = [(row, i) for row, length in enumerate(lengths) for i in range(length)]
        else:
            places = [(row, length - 1) for row, length in enumerate(lengths)]
        wanted = tuple(torch.tensor(numbers, device=device) for numbers in zip(*places, strict=True))
        tokens = torch.tensor(padded, device=device)
        logits = self.stages(tokens, rows.position_ids_bs, cache=rows, wanted=wanted)
        if logits is not None:
            logits = self.stages.whole_vocabulary(logits)
        if pp.size > 1 and self.mesh.tp.rank == 0:
            if self.stages.is_last:
                self.stages.transfers.send(logits, 0)
            elif pp.rank == 0:
                shape = (len(places), self.vocab_size)
                logits = self.stages.transfers.receive(shape, torch.float32, pp.size - 1)()
        self.stages.transfers.finish()
        return logits.cpu() if self.mesh.is_first else torch.empty(0)


def check_prompt(prompt: Sequence[int], length: int) -> None:
    """Raise `InputError` if a prompt has no tokens, or leaves no room for one more among `length`."""
    if not prompt:
        raise InputError("the prompt is empty; give at least one token to begin with")
    if len(prompt) >= length:
        raise InputError(f"the prompt has {len(prompt)} tokens, and the model sees {length}; shorten it")


@contextmanager
def _whole() -> Iterator[None]:
    """A block after which Ctrl-C has its effect. In the middle of it the other processes would wait for the rest."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
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
