"""Muon against torch's, and the assignment of matrices to ranks."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import ALIGNMENT, Bucket, lay_out
from megatron.optim.matrices import MatrixShard
from megatron.optim.muon import Muon, MuonConfig, newton_schulz
from megatron.optim.optimizer import param_groups
from megatron.optim.spec import Shard, StepInputs
from megatron.parallel.mesh import ALONE, Axis, Mesh

CPU = torch.device("cpu")


def shard(weight: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor) -> MatrixShard:
    return MatrixShard(weight, grad, {"momentum_buffer": momentum}, tuple(weight.shape), ALONE, [], [])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(("shape_scaling", 1.0), "original"), (("spectral", 0.2), "match_rms_adamw")],
)
def test_equals_torch_in_fp64(
    ours: tuple[str, float], theirs: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch rounds to bf16 before Newton-Schulz; the patch keeps fp64.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(*shape, generator=generator).double() for shape in ((24, 8), (8, 24), (16, 16))]
    expected = [torch.nn.Parameter(weight.clone()) for weight in start]
    oracle = torch.optim.Muon(
        expected, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=4, adjust_lr_fn=theirs
    )
    mode, factor = ours
    muon = Muon(
        MuonConfig(
            muon_momentum=0.9,
            muon_nesterov=nesterov,
            muon_num_ns_steps=4,
            muon_scale_mode=mode,
            muon_extra_scale_factor=factor,
        )
    )
    weights, momenta = [w.clone() for w in start], [torch.zeros_like(w) for w in start]
    taken, scale = torch.tensor([0.0, 4.0]).double()
    for _ in range(10):
        grads = [torch.randn(w.shape, generator=generator).double() for w in start]
        for p, grad in zip(expected, grads, strict=True):
            p.grad = grad.clone()
        oracle.step()
        shards = [shard(w, grad * 4, m) for w, grad, m in zip(weights, grads, momenta, strict=True)]
        muon.step(
            shards, StepInputs(lr=0.02, weight_decay=0.1, steps=taken, grad_scale=scale, found_inf=taken)
        )
    for mine, p in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, p.data, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (32, 32)])
@pytest.mark.parametrize(
    ("mode", "factor"),
    [
        ("spectral", lambda rows, columns: math.sqrt(max(rows, columns))),
        ("unit_rms_norm", lambda rows, columns: math.sqrt(rows / columns)),
        ("shape_scaling", lambda rows, columns: math.sqrt(max(1, rows / columns))),
    ],
)
def test_updates_have_the_scale_of_their_mode(shape: tuple[int, int], mode: str, factor) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight, zero = torch.zeros(shape), torch.tensor(0.0)
    muon = Muon(MuonConfig(muon_scale_mode=mode, muon_extra_scale_factor=3.0))
    step = shard(weight, grad.clone(), torch.zeros(shape))
    muon.step([step], StepInputs(lr=0.5, weight_decay=0.1, steps=zero, grad_scale=None, found_inf=zero))
    # The update does not depend on the scale of the gradient.
    torch.testing.assert_close(
        weight, -0.5 * 3 * factor(*shape) * newton_schulz(grad, 5), rtol=1e-4, atol=1e-5
    )


def test_an_expert_without_tokens_keeps_its_weights() -> None:
    """Its gradient and momentum are zero, of which the orthogonal matrix would be 0 / 0."""
    weight, zero = torch.ones(6, 4), torch.tensor(0.0)
    step = shard(weight, torch.zeros(6, 4), torch.zeros(6, 4))
    inputs = StepInputs(lr=0.5, weight_decay=0.0, steps=zero, grad_scale=None, found_inf=zero)
    Muon(MuonConfig()).step([step], inputs)
    assert weight.equal(torch.ones(6, 4))


def test_newton_schulz_brings_singular_values_close_to_one() -> None:
    u, _ = torch.linalg.qr(torch.randn(40, 20, generator=torch.Generator().manual_seed(0)).double())
    v, _ = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(1)).double())
    singular = torch.logspace(-1.5, 1, 20).double()
    x = newton_schulz(u * singular @ v.T, 5)
    found = u.T @ x @ v
    assert ((found.diagonal() > 0.65) & (found.diagonal() < 1.25)).all()
    torch.testing.assert_close(u * found.diagonal() @ v.T, x)


def buckets(replicas: int, rank: int, bucket_size: int = 50_000) -> list[Bucket]:
    config = ModelConfig(num_layers=8, hidden_size=48, num_attention_heads=4, max_position_embeddings=16)
    with torch.device("meta"):
        model = GPTModel(config, ModelContext(vocab_size=64, padded_vocab_size=64))
    replicas_axis = Axis(rank, replicas)
    mesh = Mesh(device=CPU, dp=replicas_axis, dp_cp=replicas_axis)
    groups = param_groups(OptimizerConfig(lr=1.0, optimizer="muon"), mesh, sharding="optim")
    return lay_out([model], groups, bucket_size=bucket_size)


def test_muon_updates_the_matrices_of_layers_and_adam_the_rest() -> None:
    laid_out = buckets(1, 0)
    muon, adam = (
        {e.name for b in laid_out if ("exp_avg" in b.group.optimizer.state) == adam for e in b.flat_params}
        for adam in (False, True)
    )
    assert len(muon) == 8 * 4 and all(".layers." in name and name.endswith(".weight") for name in muon)
    assert {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"} < adam
    assert len(adam) == 4 + 8 * 8


@pytest.mark.parametrize("replicas", [2, 3, 4, 40])
def test_each_matrix_has_one_owner_and_owners_are_balanced(replicas: int) -> None:
    work, owned = [0] * replicas, []
    for rank in range(replicas):
        for bucket in buckets(replicas, rank):
            assert bucket.shards[0][0] == bucket.start and bucket.shards[-1][1] == bucket.end
            assert bucket.shard == bucket.shards[rank] and bucket.shard[0] % ALIGNMENT == 0
            for entry in bucket.flat_params if isinstance(bucket.group.optimizer, Muon) else ():
                begin, end = bucket.shard
                assert end <= entry.start or begin <= entry.start <= entry.end <= end or entry.end <= begin
                if begin <= entry.start < end:
                    owned.append(entry.name)
                    work[rank] += math.prod(entry.shard_spec.shape) * min(entry.shard_spec.shape)
    assert len(owned) == len(set(owned)) == 8 * 4
    largest = 4 * 48**3
    assert max(work) <= max(1.15 * sum(work) / replicas, largest)


def test_each_expert_has_matrices_of_its_own() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        ffn_hidden_size=12,
        position_embedding_type="none",
        num_experts=2,
        add_bias_linear=False,
        swiglu=True,
    )
    with torch.device("meta"):
        model = GPTModel(config, ModelContext(vocab_size=10, padded_vocab_size=10))
    groups = param_groups(OptimizerConfig(lr=1, optimizer="muon"), Mesh(device=CPU))
    buckets = lay_out([model], groups, bucket_size=10**6)
    (bucket,) = (b for b in buckets if any("experts" in param.name for param in b.flat_params))
    flat = torch.arange(bucket.end - bucket.start, dtype=torch.float32)
    matrices = bucket.group.optimizer.divide(
        Shard(flat, flat.clone(), {"momentum_buffer": flat.clone()}), bucket, ALONE
    )
    # [outputs, inputs]; the second layer of an expert is stored transposed.
    assert [matrix.shape for matrix in matrices] == [(24, 8)] * 2 + [(8, 12)] * 2
    assert [tuple(matrix.weight.shape) for matrix in matrices] == [(24, 8)] * 2 + [(12, 8)] * 2
    assert [int(matrix.weight[0, 0]) for matrix in matrices] == [0, 192, 384, 480]
