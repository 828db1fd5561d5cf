"""Attention over a divided sequence against dense attention in fp64, and what it computes and sends."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from flash_attention import on_a_gpu
from torch import Tensor

from megatron.context_parallel import attention as context_attention
from megatron.context_parallel.attention import ContextAttention, split_axis
from megatron.context_parallel.blocks import blocks
from megatron.context_parallel.kernels import (
    partial_attention,
    partial_attention_backward,
    plain_partial_attention,
    plain_partial_attention_backward,
)
from megatron.data.zigzag import Zigzag
from megatron.ops.attention import MaskSpec
from megatron.ops.backend import PLAIN
from megatron.ops.scored_attention import ScoreRules, kept_pairs, whole_pairs
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import ALONE, Axis, Mesh, join
from megatron.planner.counting import Counter, Traffic

CPU = torch.device("cpu")
BATCH, HEADS, WIDTH = 2, 8, 16
# Ranks, ranks that exchange heads, whether keys are gathered, query groups.
GRIDS = {
    "p2p": (2, 1, False, 2),
    "all_gather": (2, 1, True, 8),
    "a2a": (2, 2, False, 4),
    "p2p of four, one group": (4, 1, False, 1),
    "all_gather of four": (4, 1, True, 2),
    "a2a of four": (4, 4, False, 4),
    "a2a+p2p": (4, 2, False, 2),
}
MASKS = ("causal", "full", "documents", "window", "documents in a window")
RULES = ("softmax", "soft cap", "ALiBi", "sinks", "dropout", "all at once")


def dense(
    q: Tensor, k: Tensor, v: Tensor, spec: MaskSpec, rules: ScoreRules, sinks_n: Tensor | None
) -> Tensor:
    """Attention by its formula."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    position = torch.arange(spec.length)
    allowed = torch.ones(1, spec.length, spec.length, dtype=torch.bool)
    distance = position.unsqueeze(1) - position
    if spec.causal:
        allowed = allowed & (distance >= 0)
    if spec.window is not None:
        allowed = allowed & (distance.abs() <= spec.window)
    if spec.document_ids_bs is not None:
        allowed = allowed & (spec.document_ids_bs.unsqueeze(1) == spec.document_ids_bs.unsqueeze(2))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.slopes_n is not None:
        scores = scores - rules.slopes_n.view(-1, 1, 1) * distance
    scores = scores.masked_fill(~allowed.unsqueeze(1), -torch.inf)
    if sinks_n is not None:
        scores = torch.cat((scores, sinks_n.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : spec.length]
    if rules.dropout > 0:
        every = whole_pairs(0, spec.length, spec.length, CPU)
        weights = weights * kept_pairs(rules, *q.shape[:2], every) / (1 - rules.dropout)
    return weights @ v


def make_spec(name: str, length: int) -> MaskSpec:
    generator = torch.Generator().manual_seed(length)
    ids = (torch.rand(BATCH, length, generator=generator) < 0.15).cumsum(1)
    return MaskSpec(
        length=length,
        causal=name != "full",
        window=5 if "window" in name else None,
        document_ids_bs=ids if "documents" in name else None,
        device=CPU,
    )


def world_of(processes: int) -> tuple[Mesh, Axis]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = Mesh(CPU, Axis(rank, dist.get_world_size(), ranks=range(dist.get_world_size())))
    mesh = dataclasses.replace(mesh, timeout=datetime.timedelta(seconds=60))
    return mesh, join(range(processes), "context-parallel", mesh)


def grid(processes: int, heads: int, gathers: bool) -> ContextAttention:
    mesh, cp = world_of(processes)
    exchanging, ring = (
        join(ranks, "context-parallel", mesh) if len(ranks) > 1 else ALONE for ranks in split_axis(cp, heads)
    )
    return ContextAttention(cp, exchanging, ring, gathers=gathers, inner=PLAIN)


def rules_of(name: str, causal: bool) -> ScoreRules:
    every = name == "all at once"
    return ScoreRules(
        softcap=0.7 if every or name == "soft cap" else None,
        slopes_n=torch.rand(HEADS, dtype=torch.float64) if causal and (every or name == "ALiBi") else None,
        dropout=0.3 if every or name == "dropout" else 0.0,
        words=torch.tensor([5, -7], dtype=torch.int32) if every or name == "dropout" else None,
    )


def compare(
    processes: int, heads: int, gathers: bool, groups: int, dtype: torch.dtype, rule: str
) -> dict[str, float]:
    """Largest difference of outputs and gradients from dense attention, by mask."""
    attention, length = grid(processes, heads, gathers), 32
    rank, size = attention.cp.rank, attention.cp.size
    found = {}
    for name in MASKS:
        torch.manual_seed(1)
        spec = make_spec(name, length)
        zigzag = Zigzag.of(length, size, documents=spec.document_ids_bs is not None)
        shapes = [(BATCH, n, length, WIDTH) for n in (HEADS, groups, groups, HEADS)]
        *inputs, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        rules = rules_of(rule, spec.causal)
        sinks = [torch.randn(HEADS, dtype=torch.float64)] if rule in ("sinks", "all at once") else []
        expected = [x.clone().requires_grad_() for x in (*inputs, *sinks)]
        out = dense(*expected[:3], spec, rules, expected[3] if sinks else None)
        out.backward(grad)
        local = [zigzag.shard(x, 2, rank).to(dtype).requires_grad_() for x in inputs]
        local_sinks = [x.to(dtype).requires_grad_() for x in sinks]
        ids = spec.document_ids_bs
        mine = dataclasses.replace(
            spec,
            document_ids_bs=None if ids is None else zigzag.shard(ids, 1, rank),
            slopes_n=rules.slopes_n,
        )
        with mock.patch.object(context_attention, "draw_words", lambda _, words=rules.words: words):
            result = attention.attention(
                *local,
                mask_bnst=attention.make_mask(mine),
                causal=spec.causal,
                dropout=rules.dropout,
                softcap=rules.softcap,
                sinks_n=local_sinks[0] if sinks else None,
            )
        result.backward(zigzag.shard(grad, 2, rank).to(dtype))
        pairs = [(result, out), *((a.grad, b.grad) for a, b in zip(local, expected, strict=False))]
        differences = [float((a.double() - zigzag.shard(b, 2, rank)).abs().max().detach()) for a, b in pairs]
        for x, whole in zip(local_sinks, expected[3:], strict=True):  # each rank has its queries' part
            differences.append(
                float((all_reduce_sum(x.grad.double(), attention.cp) - whole.grad).abs().max())
            )
        found[name] = max(differences)
    return found


def check_grids(names: list[str], rules: tuple[str, ...]) -> None:
    for name, dtype, rule in itertools.product(names, (torch.float64, torch.float32), rules):
        for mask, difference in compare(*GRIDS[name], dtype, rule).items():
            bound = 1e-12 if dtype == torch.float64 else 5e-6
            assert difference < bound, f"{name}, {mask}, {rule}: {difference}"


@pytest.mark.parametrize(
    "processes", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["two ranks", "four ranks"]
)
def test_a_divided_sequence_attends_as_a_whole_one(processes: int) -> None:
    rules = RULES if processes == 4 else ("softmax", "all at once")
    run_distributed(
        check_grids, processes, [name for name, grid in GRIDS.items() if grid[0] == processes], rules
    )


def check_flash(names: list[str]) -> None:
    with on_a_gpu() as calls:
        for name in names:
            for mask, difference in compare(*GRIDS[name], torch.bfloat16, "softmax").items():
                assert difference < 0.1, f"{name}, {mask}: {difference}"
    assert all(call.called for call in calls)


@pytest.mark.parametrize(
    "processes", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["two ranks", "four ranks"]
)
def test_a_divided_sequence_attends_as_a_whole_one_on_a_gpu(processes: int) -> None:
    run_distributed(
        check_flash, processes, [name for name, grid in GRIDS.items() if grid[0] == processes > grid[1]]
    )


def check_empty(names: list[str]) -> None:
    for name in names:
        processes, heads, gathers, groups = GRIDS[name]
        attention = grid(processes, heads, gathers)
        spec = MaskSpec(length=32, window=5, device=CPU)
        q, k, v = (
            torch.randn(0, n, 32 // processes, WIDTH, requires_grad=True) for n in (HEADS, groups, groups)
        )
        out = attention.attention(
            q, k, v, mask_bnst=attention.make_mask(spec), causal=True, dropout=0.0, softcap=1.0
        )
        out.sum().backward()
        assert out.shape == q.shape and k.grad.shape == k.shape


def test_a_batch_without_sequences() -> None:
    """The last microbatch of a replica in evaluation may have none."""
    run_distributed(check_empty, 2, [name for name, grid in GRIDS.items() if grid[0] == 2])


def count_bytes(processes: int, heads: int, gathers: bool, groups: int) -> dict[str, Traffic]:
    attention, s = grid(processes, heads, gathers), 16
    mask = attention.make_mask(MaskSpec(length=s * processes, device=CPU))
    local = [
        torch.randn(BATCH, n, s, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for n in (HEADS, groups, groups)
    ]
    axes = [axis for axis in (attention.heads, attention.ring) if axis.size > 1]
    with Counter(axes[0].heartbeat) as counter:
        out = attention.attention(*local, mask_bnst=mask, causal=True, dropout=0.0)
        out.backward(torch.ones_like(out))
    return {kind: traffic for (kind, _), traffic in counter.traffic.items()}


def check_bytes(name: str) -> None:
    """Bytes of bf16 inputs and fp32 sums of gradients, of `s` positions a rank."""
    processes, heads, gathers, groups = GRIDS[name]
    keys_values = 2 * BATCH * groups * 16 * WIDTH
    queries = BATCH * HEADS * 16 * WIDTH
    ring = processes // heads
    expected = {}
    if heads > 1:  # queries, keys, values there and outputs back; gradients, and a product of each output
        expected["all-to-all"] = Traffic(4, 2 * 2 * (2 * queries + keys_values) + 4 * queries // WIDTH)
    if ring > 1 and gathers:
        whole = ring * keys_values
        expected |= {"all-gather": Traffic(2, 2 * 2 * whole), "reduce-scatter": Traffic(1, 4 * whole)}
    elif ring > 1:  # keys and values twice, and sums in fp32 once more to come home
        sent = 2 * 2 * (ring - 1) * keys_values + 4 * ring * keys_values
        expected["shift"] = Traffic(2 * (ring - 1) + ring, sent)
    assert count_bytes(processes, heads, gathers, groups) == expected


def check_all_bytes(names: list[str]) -> None:
    for name in names:
        check_bytes(name)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_the_bytes_are_those_of_the_formulas(processes: int) -> None:
    run_distributed(
        check_all_bytes, processes, [name for name, grid in GRIDS.items() if grid[0] == processes]
    )


@pytest.mark.parametrize("size", [2, 4, 16])
def test_causal_work_is_equal_on_all_ranks(size: int) -> None:
    spec = MaskSpec(length=4096, device=CPU)

    def pairs(rank: int, source: int) -> float:
        count = 0.0
        for block in blocks(spec, Zigzag(4096, size), rank, source):
            square = (block.queries[1] - block.queries[0]) * (block.keys[1] - block.keys[0])
            count += square / 2 if block.causal else square
        return count

    work = [sum(pairs(rank, source) for source in range(size)) for rank in range(size)]
    assert work == [4096**2 / 2 / size] * size
    # And so is that of every step of the ring.
    assert len({pairs(rank, source) for rank in range(size) for source in range(size)}) == 1


@pytest.mark.parametrize("kernel", ["mask", "causal", "all"])
@pytest.mark.parametrize("width", [WIDTH, 10, 24])
def test_partial_attention_is_its_formula(kernel: str, width: int) -> None:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 4, 12, WIDTH), torch.randn(2, 4, 12, width)
    k, v = torch.randn(2, 2, 12, WIDTH), torch.randn(2, 2, 12, width)
    mask = torch.rand(2, 1, 12, 12) < 0.3 if kernel == "mask" else None
    if mask is not None:
        mask[:, :, 3] = False
    out, lse = partial_attention(q, k, v, mask, causal=kernel == "causal")
    plain, plain_lse = plain_partial_attention(q, k, v, mask, causal=kernel == "causal")
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(lse, plain_lse)
    if mask is not None:
        assert (lse[:, :, 3] == -torch.inf).all() and (out[:, :, 3] == 0).all()
        lse = lse.clamp(min=-1e30)  # as after other keys
    arguments = grad, q, k, v, out, lse, mask
    for a, b in zip(
        partial_attention_backward(*arguments, causal=kernel == "causal"),
        plain_partial_attention_backward(*arguments, causal=kernel == "causal"),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
