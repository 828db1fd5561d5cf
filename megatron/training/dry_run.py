"""What a run would need, counted on one process, without its devices and its data.

The true engine takes the microbatches of an iteration through the true schedule, for one rank after the other; only
the tensors are fake, and so is the process group.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO

import torch
from tqdm import tqdm

from megatron.data.loader import Batch
from megatron.flags import InputError, either
from megatron.model.layers import TensorParallel
from megatron.ops.backend import Ops, choose_ops
from megatron.optim.layout import lay_out
from megatron.parallel.mesh import ALONE, AXES, fake_mesh, world_size
from megatron.parallel.pipeline import BEHIND
from megatron.parallel.recompute import Recompute
from megatron.parallel.stages import Chunk, chunks_per_stage
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.null import NullTokenizer
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig
from megatron.training.counting import Counter, Traffic
from megatron.training.engine import Engine
from megatron.training.fakes import fake_tensors
from megatron.training.layout import check_layout
from megatron.training.task import Part, Task

CPU = torch.device("cpu")
# Samples that the longest is looked for among.
SAMPLES = 256

# Of a batch, what each field is like.
Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What a rank needs for an iteration.

    Attributes:
        parameters: that it holds, and `counted` those among them that no other rank of its replica counts, without what
            pads the vocabulary.
        memory: bytes by what they are for, of when the forward and backward passes take the most; "activations" is all
            that these passes have made by then. "at most" is the most of the whole iteration.
        traffic: by kind of communication and name of the axis.
        flops: as `Counter` counts.
    """

    rank: int
    place: dict[str, int]
    parameters: int
    counted: int
    memory: dict[str, int]
    traffic: dict[tuple[str, str], Traffic]
    flops: int


def dry_run(config: RunConfig, task: Task) -> int:
    """Count what some ranks of a run would need, and tell it. Gives the status to exit with, 0.

    Raises:
        InputError: the flags do not fit each other, or there is no vocabulary to count with.
    """
    plan, parallel = config.dry_run, config.parallel
    if world_size() > 1:
        raise InputError("--dry-run: one process counts for all; start it by python in place of torchrun")
    stages = parallel.pipeline_model_parallel_size
    replica = parallel.tensor_model_parallel_size * stages
    processes = plan.world_size or replica
    if processes % replica:
        below = processes // replica * replica
        raise InputError(
            f"--world-size: {processes} is not a multiple of {replica}, --tensor-model-parallel-size times "
            f"--pipeline-model-parallel-size; choose {either(n for n in (below, below + replica) if n)}"
        )
    check_layout(config, processes)
    first_ranks = range(0, processes, processes // stages)
    ranks = plan.dry_run_ranks or sorted({first_ranks[i] for i in (0, stages // 2, stages - 1)})
    beyond = [rank for rank in ranks if rank >= processes]
    if beyond:
        raise InputError(
            f"--dry-run-ranks: {beyond[0]} is not a rank of this run; the last of its {processes} (--world-size) is "
            f"{processes - 1}"
        )
    with _opened(plan.dry_run_json) as file:
        counting = Counting.of(config, task, processes)
        print(counting.describe(), flush=True)
        found = []
        for rank in ranks:
            begin = time.perf_counter()
            found.append(counting.count(rank))
            print(f"rank {rank} counted in {time.perf_counter() - begin:.0f} s", flush=True)
        print(table(found))
        if file is not None:
            record = counting.record() | {"ranks": [as_json(needs) for needs in found]}
            file.write(json.dumps(record, indent=2) + "\n")
    return 0


def _opened(path: str | None) -> AbstractContextManager[TextIO | None]:
    """The file that is to be written, before there is work that would be lost if it cannot be."""
    try:
        return nullcontext() if path is None else open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--dry-run-json: {path}: {error.strerror}") from None


def vocabulary(config: TokenizerConfig) -> int:
    """The tokenizer's number of ids: what --vocab-size says, or else its files."""
    if config.tokenizer_type == "NullTokenizer" or config.vocab_size is None:
        try:
            return build_tokenizer(config).vocab_size
        except InputError as error:
            raise InputError(f"{error}; a dry run does without files where --vocab-size is given") from None
    return config.vocab_size


def longest_batch(config: RunConfig, task: Task, vocab_size: int) -> Fields:
    """The fields of a microbatch of the longest samples that there are."""
    data = dataclasses.replace(
        config.data,
        mock_data=True,
        split=None,
        **dict.fromkeys(("data_path", "train_data_path", "valid_data_path", "test_data_path")),
    )
    tokenizer = NullTokenizer(vocab_size - 1)
    mock = dataclasses.replace(config, data=data)
    samples = task.build_datasets(mock, tokenizer, (SAMPLES, 0, 0))["train"]

    def fields(i: int) -> dict[str, Any]:
        stacked = samples.stack([samples[i]] * config.training.micro_batch_size, data.seq_length)
        return samples.fields(stacked, tokenizer.eod, data)

    longest = max(map(fields, range(SAMPLES)), key=lambda batch: sum(x.size for x in batch.values()))
    return {name: (x.shape, torch.from_numpy(x).dtype) for name, x in longest.items()}


def enough_microbatches(config: RunConfig, microbatches: int) -> int:
    """As many microbatches of an iteration as it takes until what follows repeats what has been.

    With 1F1B a stage is as full as it gets after one for each stage, and then does a forward and a backward pass in
    turn; some more let as many sends be under way as there can be. With several chunks it is full after less than two
    for each stage, and repeats itself with every further one for each. GPipe repeats nothing.
    """
    stages, schedule = config.parallel.pipeline_model_parallel_size, config.parallel.pipeline_schedule
    if schedule == "gpipe" and stages > 1:
        return microbatches
    return min(microbatches, 3 * stages if schedule == "interleaved" else stages + 2 * BEHIND)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting:
    """What is counted.

    Attributes:
        vocab_sizes: ids of the tokenizer, and rows that they are padded to.
        fields: of a microbatch.
        microbatches: of an iteration, on each replica.
    """

    config: RunConfig
    task: Task
    processes: int
    vocab_sizes: tuple[int, int]
    fields: Fields
    microbatches: int

    @classmethod
    def of(cls, config: RunConfig, task: Task, processes: int) -> Counting:
        # Timers and graphs are a GPU's own.
        config = dataclasses.replace(
            config,
            logging=dataclasses.replace(config.logging, timing_log_level=0),
            training=dataclasses.replace(config.training, cuda_graph=False),
        )
        tensor = config.parallel.tensor_model_parallel_size
        replicas = processes // (tensor * config.parallel.pipeline_model_parallel_size)
        size = vocabulary(config.tokenizer)
        padded = padded_vocab_size(size, config.tokenizer.make_vocab_size_divisible_by, tensor)
        return cls(
            config=config,
            task=task,
            processes=processes,
            vocab_sizes=(size, padded),
            fields=longest_batch(config, task, size),
            microbatches=BatchSchedule.from_config(config.training, replicas).most_microbatches,
        )

    @property
    def gpu(self) -> bool:
        return self.config.training.device != "cpu"

    @property
    def passes(self) -> int:
        """Microbatches that are gone through; the others would do the same again."""
        return enough_microbatches(self.config, self.microbatches)

    def model_parameters(self) -> int:
        """Of the whole model, without what pads the vocabulary."""
        size, padded = self.vocab_sizes
        whole = Part(
            vocab_size=size,
            padded_vocab_size=padded,
            chunk=Chunk(range(self.config.model.num_layers)),
            tp=TensorParallel(),
            recompute=Recompute(),
        )
        with torch.device("meta"):
            model = self.task.build_model(self.config, whole)
        entries = [e for b in lay_out([model], bucket_size=1, shards=ALONE) for e in b.entries]
        return sum(end - begin for e in entries for begin, end in e.flat(e.counted(ALONE)))

    def count(self, rank: int) -> Needs:
        """What a rank needs."""
        size, padded = self.vocab_sizes
        with fake_mesh(self.config.parallel, CPU, rank=rank, processes=self.processes) as mesh:
            counter = Counter(mesh.activity)
            with fake_tensors(gpu=self.gpu), counter:
                engine = Engine(
                    self.config,
                    self.task,
                    mesh,
                    vocab_size=size,
                    padded_vocab_size=padded,
                    choose=functools.partial(self.choose_ops, counter),
                    check=lambda *_, **__: None,
                )
                return count_step(
                    engine, counter, self.batches(), passes=self.passes, microbatches=self.microbatches
                )

    def choose_ops(self, counter: Counter, *args: Any, device: torch.device, **settings: Any) -> Ops:
        """The operations that a run on the device has, of which those that would be compiled are counted as such."""
        return choose_ops(
            *args,
            device=torch.device("cuda" if self.gpu else "cpu"),
            find=lambda _: (counter.fused, "the others compiled"),
            adds=lambda _, device: device.type == "cuda",
            **settings,
        )

    def batches(self) -> Iterator[Batch]:
        while True:
            yield {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self.fields.items()}

    def describe(self) -> str:
        """What is counted, in some lines."""
        record = self.record()
        layout = " x ".join(f"{name} {record[name]}" for name in ("tensor", "data", "pipeline"))
        lines = [
            f"dry run of {self.task.name} with {record['parameters']:,} parameters",
            f"computed in {record['precision']} by a {'GPU' if self.gpu else 'CPU'}'s operations",
            f"processes: {layout} = {self.processes}",
            f"microbatches on each replica: {self.microbatches}, samples in each: {record['micro batch size']}",
        ]
        if record["chunks"] > 1:
            lines.insert(3, f"chunks of layers on each stage: {record['chunks']}")
        if self.passes < self.microbatches:
            lines.append(
                f"gone through: the first {self.passes}; the others are counted as doing the same again"
            )
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The same as JSON has it."""
        parallel = self.config.parallel
        tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        return {
            "task": self.task.name,
            "parameters": self.model_parameters(),
            "tensor": tensor,
            "data": self.processes // (tensor * pipeline),
            "pipeline": pipeline,
            "chunks": chunks_per_stage(parallel, self.config.model.num_layers),
            "device": "cuda" if self.gpu else "cpu",
            "precision": self.config.training.precision,
            "micro batch size": self.config.training.micro_batch_size,
            "microbatches": self.microbatches,
            "microbatches gone through": self.passes,
        }


class Passes:
    """In place of an engine's timers: notes where the forward and backward passes begin and end, and shows progress."""

    def __init__(self, counter: Counter, bar: tqdm) -> None:
        self.counter, self.bar = counter, bar

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        counter = self.counter
        if phase == "forward-backward":
            counter.peak = self.live = counter.live
            self.before = dict(counter.traffic), counter.flops
        yield
        if phase == "forward-backward":
            self.peak = counter.peak
            self.after = dict(counter.traffic), counter.flops
        if phase.endswith("-compute"):
            self.bar.update()


def count_step(
    engine: Engine, counter: Counter, batches: Iterator[Batch], *, passes: int, microbatches: int
) -> Needs:
    """What a process needs for an iteration of so many `microbatches`, of which the first `passes` are gone through.

    The engine has been built within `counter`'s block, and this is called there.
    """
    counter.traffic.clear()
    counter.flops = 0
    mesh, config = engine.mesh, engine.config
    with tqdm(
        total=2 * passes * len(engine.parts),
        desc=f"rank {mesh.world.rank}",
        unit="pass",
        leave=False,
        disable=not (config.logging.progress and sys.stderr.isatty()),
    ) as bar:
        engine.timers = seen = Passes(counter, bar)
        engine.train_step(
            _noting_bytes(batches, sizes := []),
            num_microbatches=passes,
            consumed_samples=0,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
        )
    # Gradients are reduced over the replicas once a step, however early; over other axes every pass communicates.
    times = functools.partial(_times, microbatches, passes)
    (before, flops_before), (after, flops_after) = seen.before, seen.after
    traffic = dict(counter.traffic)
    for key in after:
        if key[1] != AXES["dp"]:
            repeated = after[key] - before.get(key, Traffic())
            traffic[key] += Traffic(times(repeated.calls), times(repeated.bytes))
    left_out = (microbatches - passes) * max(sizes)
    kinds = held(engine)
    memory = kinds | {
        "buffers": seen.live - sum(kinds.values()) + left_out,
        "activations": seen.peak - seen.live,
        "at most": counter.peak + left_out,
    }
    return Needs(
        rank=mesh.world.rank,
        place={name: getattr(mesh, name).rank for name in ("pp", "dp", "tp")},
        parameters=engine.buffer.local_elements,
        counted=sum(end - begin for e in engine.buffer.entries for begin, end in e.flat(e.counted(mesh.tp))),
        memory=memory,
        traffic=traffic,
        flops=counter.flops + times(flops_after - flops_before),
    )


def _times(microbatches: int, passes: int, count: int) -> int:
    """What those left out add to a count of those gone through."""
    assert count % passes == 0, f"{passes} microbatches do not all do the same: {count}"
    return count // passes * (microbatches - passes)


def _noting_bytes(batches: Iterator[Batch], sizes: list[int]) -> Iterator[Batch]:
    for batch in batches:
        sizes.append(sum(x.numel() * x.element_size() for x in batch.values()))
        yield batch


def held(engine: Engine) -> dict[str, int]:
    """Bytes of what a process holds from one iteration to the next."""
    buffer, optimizer = engine.buffer, engine.optimizer
    masters = [] if buffer.is_fp32 else buffer.masters
    tensors = {
        "weights": [buffer.params],
        "gradients": [buffer.grads],
        "master weights": masters,
        "moments": [piece for pieces in optimizer.moments.values() for piece in pieces],
    }
    return {name: sum(x.numel() * x.element_size() for x in found) for name, found in tensors.items()}


def table(found: list[Needs]) -> str:
    """What each rank needs, a column each."""
    rows: list[tuple[str, list[str]]] = []

    def row(title: str, value: Callable[[Needs], str]) -> None:
        rows.append((title, [value(needs) for needs in found]))

    row("rank", lambda n: str(n.rank))
    row("stage, replica, tensor rank", lambda n: ", ".join(str(i) for i in n.place.values()))
    row("parameters", lambda n: f"{n.parameters:,}")
    rows.append(("memory", []))
    for kind in found[0].memory:
        row(f"  {kind}", lambda n, kind=kind: size(n.memory[kind]))
    kinds = sorted({key for needs in found for key in needs.traffic})
    if kinds:
        rows.append(("communication", []))
    for key in kinds:
        row(f"  {key[0]}, {key[1]}", lambda n, key=key: _traffic(n.traffic.get(key)))
    row("operations", lambda n: size(n.flops, "FLOP"))
    first = max(len(title) for title, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows if cells) for i in range(len(found))]
    return "\n".join(
        "  ".join([title.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=False))]).rstrip()
        for title, cells in rows
    )


def _traffic(traffic: Traffic | None) -> str:
    return "-" if traffic is None else f"{traffic.calls:,} of {size(traffic.bytes):>8}"


def size(count: float, unit: str = "B") -> str:
    """A count of bytes, or of another unit, for people: "16.4 GB"."""
    prefixes = iter("KMGTPE")
    prefix = ""
    while count >= 999.5:
        count, prefix = count / 1000, next(prefixes)
    return f"{count:.3g} {prefix}{unit}"


def as_json(needs: Needs) -> dict[str, Any]:
    record = {field.name: getattr(needs, field.name) for field in dataclasses.fields(needs)}
    record["traffic"] = [
        {"kind": kind, "axis": axis, "calls": traffic.calls, "bytes": traffic.bytes}
        for (kind, axis), traffic in sorted(needs.traffic.items())
    ]
    return record
