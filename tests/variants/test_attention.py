"""Attention with a bias of positions (ALiBi), and norms over all heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributed import run_distributed

from megatron.errors import InputError
from megatron.interop.external import meta_model
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.ops.attention import MaskSpec, make_mask
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, init_mesh
from megatron.parallel.slices import GlobalSlice
from megatron.variants.attention import HeadsNorm, alibi_bias, alibi_slopes

CPU = torch.device("cpu")


def test_slopes_of_the_paper() -> None:
    """arXiv 2108.12409 section 3: 1/2, 1/4, ..., 1/256 for 8 heads; for 16 also the square roots between."""
    assert alibi_slopes(8, CPU).tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(16, CPU), 2.0 ** -(torch.arange(1, 17) / 2))


@pytest.mark.parametrize("heads", [1, 6, 12, 40, 112])
def test_slopes_equal_those_of_transformers(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads, CPU), theirs)


def test_the_bias_of_documents() -> None:
    spec = MaskSpec(length=3, document_ids_bs=torch.tensor([[0, 0, 1]]), device=CPU)
    bias = alibi_bias(torch.tensor(0.5).view(1, 1, 1), make_mask(spec))
    never = -torch.inf
    assert bias.tolist() == [[[[0, never, never], [-0.5, 0, never], [never, never, 0]]]]


def test_norms_of_all_heads_need_the_norms_and_rms() -> None:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 8}
    norms = {"qk_layernorm": True, "normalization": "RMSNorm"}
    meta_model("GPT", ModelConfig(**sizes, **norms, qk_layernorm_all_heads=True), 10)
    for missing in norms:
        others = {name: value for name, value in norms.items() if name != missing}
        with pytest.raises(InputError, match="--qk-layernorm-all-heads needs --qk-layernorm and"):
            meta_model("GPT", ModelConfig(**sizes, **others, qk_layernorm_all_heads=True), 10)


# Numbers of heads for four tensor-parallel ranks: one rank holds each head, or two ranks hold it.
HEADS = (4, 2)


def norm_example(heads: int) -> list[torch.Tensor]:
    """x [b, n, s, d], the scale, and the gradient of the output."""
    draw = torch.Generator().manual_seed(heads)
    shapes = (2, heads, 3, 8), (heads * 8,), (2, heads, 3, 8)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def norm_of_one_head() -> list[list[np.ndarray]]:
    """Output and gradients of x and of the scale on this rank, for each of `HEADS`."""
    found = []
    with init_mesh(ParallelConfig(tensor_model_parallel_size=4), CPU) as mesh:
        for heads in HEADS:
            copies = 4 // heads
            head = mesh.tp.rank // copies
            x, scale, grad = norm_example(heads)
            shard = GlobalSlice((heads * 8,), 0, ((head * 8, head * 8 + 8),), replicas=Axis(0, copies))
            norm = HeadsNorm(shard, 1e-5, ModelContext(vocab_size=1, padded_vocab_size=1, tp=mesh.tp))
            norm.weight = torch.nn.Parameter(scale[head * 8 :][:8].clone())
            x = x[:, head : head + 1].clone().requires_grad_()
            out = norm(x)
            # The ranks that hold a head each have a part of its gradient.
            out.backward(grad[:, head : head + 1] * (mesh.tp.rank % copies + 1) / sum(range(copies + 1)))
            found.append([tensor.detach().numpy() for tensor in (out, x.grad, norm.weight.grad)])
    return found


def test_norms_of_all_heads_equal_torch_on_split_heads() -> None:
    by_rank = run_distributed(norm_of_one_head, 4)
    for heads, ranks in zip(HEADS, zip(*by_rank, strict=True), strict=True):
        x, scale, grad = (tensor.double().requires_grad_() for tensor in norm_example(heads))
        flat = x.transpose(1, 2).flatten(2)  # [b, s, n d]
        out = (
            torch.nn.functional.rms_norm(flat, flat.shape[-1:], scale, 1e-5)
            .view(2, 3, heads, 8)
            .transpose(1, 2)
        )
        out.backward(grad.detach())
        for head in range(heads):
            copies = ranks[head * 4 // heads : (head + 1) * 4 // heads]
            outputs, grads_x, grads_scale = (np.stack(each) for each in zip(*copies, strict=True))
            for found in outputs:
                np.testing.assert_allclose(found, out.detach()[:, head : head + 1], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(grads_x.sum(0), x.grad[:, head : head + 1], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(grads_scale.sum(0), scale.grad[head * 8 :][:8], rtol=1e-4, atol=1e-5)


def test_bert_is_refused() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=8,
        position_embedding_type="alibi",
    )
    with pytest.raises(
        InputError, match=r"--position-embedding-type alibi, .* are for causal attention, not BERT"
    ):
        meta_model("BERT", config, 10)
