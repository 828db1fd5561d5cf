"""Activations in host memory: the same bits as on the device, in less memory of the device."""

from __future__ import annotations

import gc

import pytest
import torch
from distributed import run_distributed
from gpu_path.recorded_step import train
from models import CPU, config_of

from megatron.errors import InputError
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.performance import activation_offload
from megatron.performance.activation_offload import SPARE, Activation, HostCopies, Pass, last_overlapped
from megatron.planner.activations import layer_activations
from megatron.planner.dry_run import DryRun, longest_batch
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import OURS
from megatron.pretrain_gpt import GPT
from megatron.training.build import build_engine
from megatron.training.engine import Engine

OFFLOAD = "--cpu-offload-activations"
LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
"""
MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear --moe-aux-loss-coeff 0.1"


def trained(flags: str, mesh: Mesh | None = None) -> Engine:
    """An engine after two steps of two microbatches, or four with dualpipe-v, which needs as many."""
    microbatches = 4 if "dualpipe-v" in flags else 2
    config = config_of(f"{flags} --global-batch-size {2 * microbatches}")
    engine = build_engine(config, GPT, mesh or Mesh(device=CPU), vocab_size=60, padded_vocab_size=60)
    engine.buffer.initialize(1)
    for step in range(2):
        train(engine, longest_batch(config, GPT, 60), microbatches, step)
    engine.buffer.gather.finish()
    return engine


def is_same(a: Engine, b: Engine) -> bool:
    moments = [[x for pieces in e.optimizer.state.values() for x in pieces] for e in (a, b)]
    return torch.equal(a.buffer.params, b.buffer.params) and all(map(torch.equal, *moments))


TWO = "--cpu-offload-activations-num-layers 2"


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--hidden-dropout 0.1 --attention-dropout 0.1", ""),
        (f"{LLAMA} --bf16 --recompute-granularity selective --reset-attention-mask", TWO),
        (f"{MIXTURE} --bf16", ""),
        (f"{LLAMA} --mtp-num-layers 1", TWO),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (f"{LLAMA} --bf16", TWO),
                (f"{MIXTURE} --moe-layer-recompute", TWO),
                (f"{LLAMA} --ops-backend layers --bf16", ""),
                ("--ops-backend layers --hidden-dropout 0.1 --attention-dropout 0", TWO),
            )
        ),
    ],
)
def test_same_bits(monkeypatch: pytest.MonkeyPatch, flags: str, layers: str) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 256)
    copied: list[int] = []
    leave = HostCopies.leave

    def counted(self: HostCopies, done: activation_offload.Pass) -> None:
        copied.append(len(done.activations))
        leave(self, done)

    monkeypatch.setattr(HostCopies, "leave", counted)
    here = trained(flags)
    assert not copied
    offloaded = trained(f"{flags} {OFFLOAD} {layers}")
    number = 2 if layers else 3
    for begin in range(0, len(copied), 4):
        assert all(copied[begin : begin + number]) and not any(copied[begin + number : begin + 4])
    assert is_same(here, offloaded)


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step all memory of the host is free for the next, and no activation is left on the device."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 256)
    made: list[HostCopies] = []
    init = HostCopies.__init__

    def keep(self: HostCopies, device: torch.device) -> None:
        init(self, device)
        made.append(self)

    monkeypatch.setattr(HostCopies, "__init__", keep)
    engine = trained(f"{LLAMA} {OFFLOAD}")
    (copies,) = made
    sizes = {key: len(free) for key, free in copies.memory.free.items()}
    assert sizes and copies.memory.used == 0
    train(engine, longest_batch(engine.config, GPT, 60), 2, 3)
    assert sizes == {key: len(free) for key, free in copies.memory.free.items()}
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is activation_offload.Activation]


def test_sizes_that_change_do_not_fill_the_host() -> None:
    """The rows of an expert differ from step to step."""
    copies = HostCopies(CPU)
    generator = torch.Generator().manual_seed(1)
    needed = 0
    for sizes in torch.randint(1000, 4000, (300, 3), generator=generator).tolist():
        activations = {i: Activation(torch.full((size,), float(i)), size) for i, size in enumerate(sizes)}
        this = Pass(activations=activations)
        copies.leave(this)
        copies.free_after_copy(this)
        copies.come(this)
        assert all(torch.equal(a.flat, torch.full((a.elements,), float(i))) for i, a in activations.items())
        needed = max(needed, 4 * sum(sizes))
        held = sum(x.nbytes for free in copies.memory.free.values() for x, _ in free)
        assert held == copies.memory.total <= SPARE * copies.memory.most_used <= SPARE**2 * needed


def compare(flags: str) -> bool:
    activation_offload.MIN_BYTES = 256
    with init_mesh(config_of(flags).parallel, CPU) as mesh:
        return is_same(trained(flags, mesh), trained(f"{flags} {OFFLOAD}", mesh))


PIPELINE, CHUNKS = "--pipeline-model-parallel-size 2", "--num-layers-per-virtual-pipeline-stage 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"{LLAMA} --bf16 --tensor-model-parallel-size 2 --sequence-parallel",
        f"{LLAMA} --bf16 --context-parallel-size 2",
        f"{LLAMA} --bf16 --data-parallel-sharding-strategy optim_grads_params --overlap-param-gather",
        f"{MIXTURE} --bf16 --expert-model-parallel-size 2",
        PIPELINE,
        f"{PIPELINE} --pipeline-schedule zb-h1",
        f"{PIPELINE} {CHUNKS}",
        f"{PIPELINE} {CHUNKS} --pipeline-schedule zb-v --bf16 {LLAMA}",
        f"{PIPELINE} {CHUNKS} --pipeline-schedule v-min",
        f"{PIPELINE} {CHUNKS} --pipeline-schedule dualpipe-v",
    ],
)
def test_two_ranks(flags: str) -> None:
    assert run_distributed(compare, 2, flags) == [True, True]


SHAPE = "--hidden-size 512 --num-attention-heads 4 --seq-length 1024 --device cuda --bf16"


def test_memory_by_formula() -> None:
    """The layers that are not offloaded, and one more, are on the device at the peak."""
    here, *offloaded = (
        DryRun.from_config(config_of(f"{SHAPE} {LLAMA} {flags}"), GPT, 1).count(0)
        for flags in ("", OFFLOAD, f"{OFFLOAD} --cpu-offload-activations-num-layers 2")
    )
    layer = offloaded[0].memory["in host memory"] // 3
    for cost, number, kept in zip(offloaded, (3, 2), (2, 3), strict=True):
        assert cost.memory["in host memory"] == number * layer
        for way in ("to device", "to host"):
            assert cost.traffic["copy", way].bytes == number * layer
        assert here.memory["activations"] - cost.memory["activations"] == (4 - kept) * layer
    job = Job(config_of(f"{SHAPE} {LLAMA}").model, 1024, vocab_size=60, global_batch_size=2)
    planned = layer_activations(job, Layout(micro_batch_size=2), 2, OURS, recompute="none")
    assert layer == pytest.approx(planned, rel=0.005)


@pytest.mark.parametrize("layers", range(1, 10))
def test_copies_have_equal_time(layers: int) -> None:
    """Copy i of N has ended at the latest after (i + 1) L / N layers, when so many are due at an even pace."""
    for number in range(1, layers + 1):
        ends = [last_overlapped(i, number, layers) for i in range(number)]
        assert all(end > i for i, end in enumerate(ends)) and ends == sorted(ends)
        assert ends[-1] == max(layers - 1, number)
        for layer in range(layers):
            on_device = min(layer + 1, number) - sum(end < layer for end in ends)
            assert on_device + max(0, layer + 1 - number) <= layers - number + 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cpu-offload-activations-num-layers 2", "needs --cpu-offload-activations"),
        (f"{OFFLOAD} --cpu-offload-activations-num-layers 5", "5 is above --num-layers 4"),
        (f"{OFFLOAD} --recompute-granularity full", "and --recompute-granularity full exclude each other"),
        (f"{OFFLOAD} --cuda-graph --attention-dropout 0", "and --cuda-graph exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(flags: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_of(flags)
