"""--cuda-graph on a CPU, with a stand-in that replays captured operations on the same memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cuda_graphs import CUDA_GRAPHS, Stream
from distributed import run_distributed
from models import CPU, config_of, engine_of
from torch import Tensor

from megatron import plugins
from megatron.data.batch import Batch
from megatron.data.gpt_dataset import GPTBatch
from megatron.errors import InputError
from megatron.faults.diagnosis import diagnose
from megatron.ops.backend import PLAIN, Ops
from megatron.ops.compiler import eager
from megatron.parallel.mesh import init_mesh
from megatron.performance.compiled_layer import layer_ops
from megatron.performance.cuda_graph import (
    WARM_UP,
    GraphedPass,
    check_cuda_graph,
    check_dropout,
    use_cuda_graph,
)
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT
from megatron.training import build
from megatron.training.engine import Engine
from megatron.training.layout import check_layout

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2
    --untie-embeddings-and-output-weights
"""
STEPS, MICROBATCHES = 6, 2


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_cuda(monkeypatch)


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch.cuda's graphs and streams with the stand-ins."""
    Stream.log.clear()
    for name, value in CUDA_GRAPHS.items():
        monkeypatch.setattr(torch.cuda, name, value)


def batches(step: int, microbatches: int = MICROBATCHES):
    generator = torch.Generator().manual_seed(step)
    for _ in range(microbatches):
        tokens = torch.randint(60, (2, 17), generator=generator)
        yield GPTBatch(
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            loss_mask=torch.randint(2, (2, 16), generator=generator).float(),
            position_ids=torch.arange(16).expand(2, 16),
            document_ids=torch.randint(3, (2, 16), generator=generator).sort().values,
        )


def train(engine: Engine, microbatches: int = MICROBATCHES) -> list[list[Tensor]]:
    """Train for some steps; return the results of each step."""
    results = []
    for step in range(STEPS):
        losses, stats = engine.train_step(
            batches(step, microbatches),
            num_microbatches=microbatches,
            consumed_samples=2 * microbatches * engine.mesh.dp.size * step,
            lr=1e-2 / (step + 1),
            weight_decay=0.1,
        )
        results.append([losses, *stats.values(), *(x.clone() for x in engine.buffer.masters)])
    return results


@pytest.mark.parametrize(
    "flags",
    [
        "",
        f"--bf16 --recompute-granularity selective {LLAMA}",
        "--fp16 --initial-loss-scale 65536 --loss-scale-window 2 --recompute-granularity full",
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_matches_training_without_a_graph_bit_for_bit(cuda: None, flags: str) -> None:
    config = config_of(f"{flags} {NO_DROPOUT}")
    with init_mesh(config.parallel, CPU) as mesh:
        plain = train(engine_of(mesh, config))
        steps = mesh.heartbeat.steps
        engine = engine_of(mesh, config)
        graph = use_cuda_graph(engine)
        graphed = train(engine)
    assert graph.captured[0].replays == STEPS * MICROBATCHES - WARM_UP
    for theirs, ours in zip(plain, graphed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert len({losses.item() for losses, *_ in graphed}) == STEPS
    assert mesh.heartbeat.steps == steps + STEPS * MICROBATCHES  # the watchdog sees progress


def test_hidden_dropout(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks differ between microbatches, since the key is copied to the graph's memory before each replay."""
    config = config_of("--hidden-dropout 0.5 --attention-dropout 0")
    with init_mesh(config.parallel, CPU) as mesh:
        # The stand-in sees no operation of compiled code.
        monkeypatch.setattr(build, "choose_ops", lambda *_, **__: Ops(**layer_ops(eager, CPU)))
        engines = [engine_of(mesh, config) for _ in range(2)]
        graph = use_cuda_graph(engines[1])
        plain, graphed = map(train, engines)
    assert graph.captured[0].replays == STEPS * MICROBATCHES - WARM_UP
    for theirs, ours in zip(plain, graphed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def overlapped(graphed: bool) -> tuple[list[list[np.ndarray]], int]:
    """Results of each step on a replica, and the number of microbatches that the graph ran."""
    flags = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
    config = config_of(f"{NO_DROPOUT} {flags}")
    with pytest.MonkeyPatch.context() as patch, init_mesh(config.parallel, CPU) as mesh:
        replace_cuda(patch)
        engine = engine_of(mesh, config)
        graph = use_cuda_graph(engine) if graphed else None
        results = [[x.numpy() for x in step] for step in train(engine, microbatches=4)]
        return results, 0 if graph is None else WARM_UP + graph.captured[0].replays


def test_overlapped_communication() -> None:
    """The first and the last microbatch of a step communicate, so the graph runs two of four."""
    plain, graphed = (run_distributed(overlapped, 2, graphed)[0] for graphed in (False, True))
    assert graphed[1] == 2 * STEPS
    for theirs, ours in zip(plain[0], graphed[0], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_streams_wait_for_each_other(cuda: None) -> None:
    total = torch.zeros(2)

    def compute(batch: Batch, step: dict[str, Tensor]) -> Tensor:
        total.add_(batch.tokens)
        return batch.tokens * step["factor"]

    graphed = GraphedPass(compute, CPU)
    for value in range(1, 7):
        out = graphed(Batch(tokens=torch.full((2,), value)), {"factor": torch.tensor(value)})
        assert torch.equal(out, torch.full((2,), value**2))
    assert total.tolist() == [21, 21]
    assert Stream.log == [
        *["side waits for main", "run on side", "main waits for side"] * WARM_UP,
        "capture on side",
    ]
    with pytest.raises(AssertionError, match="tokens"):
        graphed(Batch(tokens=torch.ones(1)), {"factor": torch.tensor(1)})


def test_diagnosis_with_a_graph(cuda: None) -> None:
    config = config_of(NO_DROPOUT)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        use_cuda_graph(engine)
        train(engine)
        with torch.no_grad():
            engine.modules[0].get_parameter("decoder.layers.1.mlp.linear_fc1.bias").fill_(torch.inf)
        found = diagnose(engine, engine.next_global_batch(batches(0), MICROBATCHES, 0))
    assert found.output.what == "the output of decoder.layers.1.mlp.linear_fc1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-model-parallel-size 2", "use --pipeline-model-parallel-size 1"),
        ("--tensor-model-parallel-size 2", "use --tensor-model-parallel-size 1"),
        ("--context-parallel-size 2", "use --context-parallel-size 1"),
        ("--attention-dropout 0.1", "use --attention-dropout 0"),
        ("--timing-log-level 2", "use --timing-log-level 1"),
    ],
)
def test_conflicting_flags(flags: str, message: str) -> None:
    """Refused before a process group is made, and by a dry run."""
    with pytest.raises(InputError, match=f"^--cuda-graph .*{message}"):
        config_of(f"--cuda-graph {NO_DROPOUT} {flags}")


def test_a_step_of_communicating_passes_alone() -> None:
    """Refused with the layout, before a process group is made."""
    overlap = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    flags = f"--cuda-graph {NO_DROPOUT} {overlap} --micro-batch-size 1"
    check_layout(config_of(f"{flags} --global-batch-size 3"), 1)
    check_layout(config_of(f"{NO_DROPOUT} {overlap} --micro-batch-size 1 --global-batch-size 2"), 1)
    with pytest.raises(InputError, match="a step has 2; leave out one of the flags"):
        check_layout(config_of(f"{flags} --global-batch-size 2"), 1)


def test_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device and the task are checked before a process group is made."""
    config = config_of(f"--cuda-graph {NO_DROPOUT}")
    monkeypatch.setattr("megatron.plugins.pretrain", lambda *_: pytest.fail("the run began"))
    with pytest.raises(InputError, match="--cuda-graph needs a GPU, and this run computes on cpu"):
        plugins.train(config, GPT, [])
    monkeypatch.setattr("megatron.performance.cuda_graph.choose_device", torch.device)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, device="cuda"))
    check_cuda_graph(config, GPT)
    with pytest.raises(
        InputError, match="--cuda-graph needs batches of one length, and those of BERT differ"
    ):
        plugins.train(config, bert(binary_head=True), [])


def test_dropout_without_keys() -> None:
    check_dropout(config_of(NO_DROPOUT), PLAIN)
    with pytest.raises(InputError, match=r"^--cuda-graph .*use --hidden-dropout 0"):
        check_dropout(config_of("--hidden-dropout 0.1 --attention-dropout 0"), PLAIN)
