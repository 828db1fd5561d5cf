"""Dry run: count the resources of a run on one process, without its devices and data.

For one rank after the other, the engine of a real run executes an iteration with its schedule. Only the tensors and the
process group are fake.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.data.batch import Batch
from megatron.errors import InputError
from megatron.flags import either
from megatron.model.context import ModelContext
from megatron.ops.activation import ACTIVATIONS
from megatron.ops.backend import Ops, choose_ops
from megatron.ops.compiler import eager
from megatron.ops.cpu.fused import fused
from megatron.ops.cpu.rotary import compiled_rotary_emb
from megatron.optim.layout import lay_out
from megatron.optim.optimizer import param_groups
from megatron.parallel.mesh import Mesh, axis_sizes, world_size
from megatron.parallel.stages import split_layers
from megatron.parallel.transfers import MAX_PENDING_SENDS
from megatron.performance.activation_offload import offload_activations
from megatron.performance.config import Fp8Config
from megatron.performance.fp8 import make_products, set_products
from megatron.performance.post_validation import make_backup
from megatron.planner.config import DryRunConfig
from megatron.planner.count_step import PhaseRecorder, count_step
from megatron.planner.counting import Counter
from megatron.planner.dry_run_report import RankCost, as_json, table
from megatron.planner.fakes import fake_mesh, fake_tensors
from megatron.reports.flops import unused_parameters
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.null import NullTokenizer
from megatron.tool import check_output_file, write_output_file
from megatron.training.batch_size import make_batch_schedule
from megatron.training.build import build_model, microbatch_flops
from megatron.training.config import RunConfig
from megatron.training.engine import DTYPES, Engine
from megatron.training.layout import check_layout
from megatron.training.task import Task

CPU = torch.device("cpu")
# Samples among which the longest is searched.
NUM_SAMPLES = 256


def dry_run(config: RunConfig, task: Task) -> int:
    """Count and print the resources of some ranks of a run. Returns the exit status 0.

    Raises:
        InputError: the flags contradict each other, or the vocabulary's size is unknown.
    """
    plan, parallel = config.plugin(DryRunConfig), config.parallel
    if world_size() > 1:
        raise InputError("--dry-run: one process counts all ranks; start it with python instead of torchrun")
    stages = parallel.pipeline_model_parallel_size
    replica = parallel.tensor_model_parallel_size * parallel.context_parallel_size * stages
    processes = plan.world_size or replica
    if processes % replica:
        below = processes // replica * replica
        context = " times --context-parallel-size" if parallel.context_parallel_size > 1 else ""
        raise InputError(
            f"--world-size: {processes} is not a multiple of {replica}, --tensor-model-parallel-size times "
            f"--pipeline-model-parallel-size{context}; choose "
            f"{either(n for n in (below, below + replica) if n)}"
        )
    check_layout(config, processes)
    first_ranks = range(0, processes, processes // stages)
    ranks = plan.dry_run_ranks or sorted({first_ranks[i] for i in (0, stages // 2, stages - 1)})
    beyond = [rank for rank in ranks if rank >= processes]
    if beyond:
        raise InputError(
            f"--dry-run-ranks: {beyond[0]} is not a rank of this run; its {processes} ranks (--world-size) end at "
            f"{processes - 1}"
        )
    file = None if plan.dry_run_json is None else Path(plan.dry_run_json)
    check_output_file("--dry-run-json", file)
    run = DryRun.from_config(config, task, processes)
    print(run.describe(), flush=True)
    costs = []
    for rank in ranks:
        begin = time.perf_counter()
        costs.append(run.count(rank))
        print(f"rank {rank} counted in {time.perf_counter() - begin:.0f} s", flush=True)
    print(table(costs))
    if file is not None:
        record = run.record() | {"ranks": [as_json(cost) for cost in costs]}
        write_output_file("--dry-run-json", file, json.dumps(record, indent=2) + "\n")
    return 0


def data_parallel_size(config: RunConfig, processes: int) -> int:
    """Number of replicas, each of the ranks that divide a sample."""
    return axis_sizes(config.parallel, processes)["dp"]


def vocabulary(config: TokenizerConfig) -> int:
    """Return the vocabulary size from --vocab-size, or else from the tokenizer's files."""
    if config.tokenizer_type == "NullTokenizer" or config.vocab_size is None:
        try:
            return build_tokenizer(config).vocab_size
        except InputError as error:
            raise InputError(f"{error}; with --vocab-size a dry run needs no tokenizer files") from None
    return config.vocab_size


def longest_batch(config: RunConfig, task: Task, vocab_size: int) -> Batch:
    """Return a microbatch of the longest samples."""
    data = dataclasses.replace(
        config.data,
        mock_data=True,
        packing="concatenated",
        padding_free=False,  # with it a microbatch costs no more
        split=None,
        data_path=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
    )
    tokenizer = NullTokenizer(vocab_size - 1)
    mock = dataclasses.replace(config, data=data)
    samples = task.build_datasets(mock, tokenizer, (NUM_SAMPLES, 0, 0))["train"]

    def batch(i: int) -> Batch:
        return samples.collate([samples[i]] * config.training.micro_batch_size)

    return max(map(batch, range(NUM_SAMPLES)), key=lambda batch: sum(x.numel() for _, x in batch.items()))


def distinct_microbatches(config: RunConfig, microbatches: int) -> int:
    """Return the number of microbatches after which an iteration only repeats itself.

    With 1F1B a stage holds the most activations after one microbatch per stage, and then alternates forward and
    backward passes; a few more reach the maximum of pending sends. The interleaved schedule reaches the maximum after
    fewer than two per stage, and repeats with each further one per stage. Others are executed whole. A single stage
    sends nothing, and its second microbatch is like all others.
    """
    stages, schedule = config.parallel.pipeline_model_parallel_size, config.parallel.pipeline_schedule
    if stages == 1:
        return min(microbatches, 2)
    if schedule not in ("1f1b", "interleaved"):
        return microbatches
    return min(microbatches, 3 * stages if schedule == "interleaved" else stages + 2 * MAX_PENDING_SENDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
    """A run to count.

    Attributes:
        vocab_sizes: size of the vocabulary, without and with padding.
        batch: a microbatch, of which only the shapes and dtypes matter.
        microbatches: number of microbatches per iteration and replica.
    """

    config: RunConfig
    task: Task
    processes: int
    vocab_sizes: tuple[int, int]
    batch: Batch
    microbatches: int

    @classmethod
    def from_config(cls, config: RunConfig, task: Task, processes: int) -> DryRun:
        tensor, replicas = config.parallel.tensor_model_parallel_size, data_parallel_size(config, processes)
        size = vocabulary(config.tokenizer)
        padded = padded_vocab_size(size, config.tokenizer.make_vocab_size_divisible_by, tensor)
        return cls(
            config=config,
            task=task,
            processes=processes,
            vocab_sizes=(size, padded),
            batch=longest_batch(config, task, size),
            microbatches=make_batch_schedule(config, replicas).max_microbatches,
        )

    @property
    def gpu(self) -> bool:
        return self.config.training.device != "cpu"

    @property
    def simulated(self) -> int:
        """Number of microbatches that are executed; the others repeat them."""
        return distinct_microbatches(self.config, self.microbatches)

    def model_parameters(self) -> int:
        """Return the whole model's number of parameters, excluding vocabulary padding."""
        size, padded = self.vocab_sizes
        context = ModelContext(vocab_size=size, padded_vocab_size=padded)
        with torch.device("meta"):
            model = self.task.build_model(self.config, context, None)
        groups = param_groups(self.config.optimizer, Mesh(device=CPU))
        buckets = lay_out([model], groups, bucket_size=1)
        return sum(param.num_counted for bucket in buckets for param in bucket.flat_params)

    def count(self, rank: int) -> RankCost:
        """Count the resources of a rank."""
        size, padded = self.vocab_sizes
        # torchao cannot be imported while tensors are fake.
        products = make_products(self.config.plugin(Fp8Config), emulate=not self.gpu)
        with fake_mesh(self.config.parallel, CPU, rank=rank, processes=self.processes) as mesh:
            counter = Counter(mesh.heartbeat)
            phases = PhaseRecorder(counter)
            with fake_tensors(gpu=self.gpu), counter:
                ops = self.choose_ops(counter, mesh)
                model = build_model(
                    self.config, self.task, mesh, ops, vocab_size=size, padded_vocab_size=padded
                )
                if products is not None:
                    set_products(self.config, model, products)
                offload_activations(self.config, model, mesh.device)
                engine = Engine(self.config, self.task, mesh, model, phases)
                backup = make_backup(engine)
                cost = count_step(
                    engine, phases, self.batches(), simulated=self.simulated, microbatches=self.microbatches
                )
                del backup  # counted by its memory
                return cost

    def choose_ops(self, counter: Counter, mesh: Mesh) -> Ops:
        """Choose the operations of a run on the device; those that would be compiled count as fused.

        Of a layer that is compiled as a whole these are the activation and RoPE; its other operations count one by one,
        which is an upper bound.
        """
        ops = choose_ops(
            self.config.ops,
            work=microbatch_flops(self.config, mesh, self.vocab_sizes[1]),
            dtype=DTYPES[self.config.training.precision],
            device=torch.device("cuda" if self.gpu else "cpu"),
            find=lambda _: (counter.fused, "counted as fused"),
            has_fused_wgrad=lambda _, device: device.type == "cuda",
        )
        if ops.device_keys is None:
            return ops
        return dataclasses.replace(
            ops,
            run=eager,
            communicate=eager,
            device_keys=None,
            activation=lambda x, name: fused(counter.fused, ACTIVATIONS[name], x),
            apply_rotary_emb=functools.partial(compiled_rotary_emb, counter.fused),
        )

    def batches(self) -> Iterator[Batch]:
        while True:
            yield self.batch.map(lambda x: torch.empty(x.shape, dtype=x.dtype))

    def describe(self) -> str:
        """Describe the run in a few lines."""
        record = self.record()
        has_experts = self.config.model.num_experts is not None
        active = f", {record['active parameters']:,} active" if has_experts else ""
        axes = ("tensor", *(("context",) if record["context"] > 1 else ()), "data", "pipeline")
        layout = " x ".join(f"{name} {record[name]}" for name in axes)
        lines = [
            f"dry run of {self.task.name} with {record['parameters']:,} parameters{active}",
            f"precision: {record['precision']}, operations: {'GPU' if self.gpu else 'CPU'}",
            f"processes: {layout} = {self.processes}",
            f"microbatches per replica: {self.microbatches}, micro batch size: {record['micro batch size']}",
        ]
        if has_experts:
            names = {"expert": "expert", "tensor": "expert tensor", "data": "expert data"}
            product = " x ".join(f"{short} {record[name]}" for short, name in names.items())
            lines.insert(3, f"experts: {product}; tokens are assumed to choose all experts equally often")
        if record["chunks"] > 1:
            lines.insert(3, f"model chunks per stage: {record['chunks']}")
        if self.config.data.reset_attention_mask:
            lines.append(
                "attention: each sample counts as one document, since the lengths of documents are in the data"
            )
        if self.simulated < self.microbatches:
            lines.append(f"simulated: the first {self.simulated} microbatches, which the others repeat")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return the description as JSON."""
        parallel = self.config.parallel
        pipeline = parallel.pipeline_model_parallel_size
        parameters = self.model_parameters()
        return {
            "task": self.task.name,
            "parameters": parameters,
            "active parameters": parameters - unused_parameters(self.config.model),
            "tensor": parallel.tensor_model_parallel_size,
            "context": parallel.context_parallel_size,
            "data": data_parallel_size(self.config, self.processes),
            "pipeline": pipeline,
            "expert": parallel.expert_model_parallel_size,
            "expert tensor": parallel.expert_tp,
            "expert data": self.processes // (pipeline * parallel.expert_size),
            "chunks": len(split_layers(parallel, self.config.model.num_layers)[0]),
            "device": "cuda" if self.gpu else "cpu",
            "precision": self.config.training.precision,
            "micro batch size": self.config.training.micro_batch_size,
            "microbatches": self.microbatches,
            "simulated microbatches": self.simulated,
        }
