"""Compiled, oneDNN, apex and fused operations against the plain ones in fp64, and the choice of the backend."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megatron.plugins  # noqa: F401 (registers SwiGLU and compiled layers)
from megatron.errors import InputError, TrainingFault
from megatron.ops import activation, apex, attention, compiler, linear, linear_cross_entropy, norm, rotary
from megatron.ops.backend import PLAIN, Ops, choose_ops, find_compiler
from megatron.ops.compiler import Compiler, eager
from megatron.ops.config import OpsConfig
from megatron.ops.cpu import activation as cpu_activation
from megatron.ops.cpu import attention as cpu_attention
from megatron.ops.cpu import linear as cpu_linear
from megatron.ops.cpu import norm as cpu_norm
from megatron.ops.cpu.fused import fused
from megatron.ops.cpu.rotary import compiled_rotary_emb
from megatron.parallel.mesh import ALONE

CPU = torch.device("cpu")
# Relative error of a few roundings in the dtype.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Each variant takes seconds to compile, so only one dtype is compiled by default.
RUNS = pytest.mark.parametrize(
    ("how", "dtype"),
    [("eager", dtype) for dtype in TOLERANCE]
    + [
        pytest.param("compiled", dtype, marks=() if dtype == torch.bfloat16 else pytest.mark.slow)
        for dtype in TOLERANCE
    ],
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """Compiler shared by all tests, with a cache folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        run = Compiler()
        if (fault := run.check(CPU)) is not None:
            pytest.skip(f"torch.compile does not work here: {fault}")
        yield run


@pytest.fixture
def run(request: pytest.FixtureRequest, how: str) -> Callable:
    return eager if how == "eager" else request.getfixturevalue("compiled")


def random(*shape: int, scale: float = 1.0, seed: int = 1) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(function: Callable, plain: Callable, dtype: torch.dtype, *inputs: Tensor) -> list[float]:
    """Relative errors of outputs and gradients of `function` in `dtype` against `plain` in fp64 on the same inputs."""
    results = []
    for f, used in ((function, dtype), (plain, torch.float64)):
        xs = [x.to(dtype).to(used).requires_grad_() for x in inputs]
        out = f(*xs)
        out.backward(gradient_of(out.shape, dtype).to(out.dtype))
        results.append([out.detach(), *(x.grad for x in xs)])
    assert [x.shape for x in results[0]] == [x.shape for x in results[1]]
    return [
        ((ours.double() - theirs).norm() / theirs.norm()).item()
        for ours, theirs in zip(*results, strict=True)
    ]


def gradient_of(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Gradient of an output in `errors`."""
    return random(*shape, seed=9).to(dtype)


def check(fast: Callable, plain: Callable, dtype: torch.dtype, *inputs: Tensor) -> None:
    """Check that `fast` in `dtype` matches `plain` in fp64.

    NaN errors fail, too; max() of a list would miss them.
    """
    found = errors(fast, plain, dtype, *inputs)
    assert all(error <= TOLERANCE[dtype] for error in found), found


@pytest.mark.parametrize(
    ("how", "dtype", "tanh"),
    [
        pytest.param(how, dtype, tanh, marks=() if how == "eager" or is_default else pytest.mark.slow)
        for how in ("eager", "compiled")
        for dtype in TOLERANCE
        for tanh in (True, False)
        for is_default in [tanh and dtype == torch.bfloat16]
    ],
)
def test_gelu(run: Callable, dtype: torch.dtype, tanh: bool) -> None:
    name = "gelu_tanh" if tanh else "gelu"
    fast = functools.partial(cpu_activation.compiled_activation, name=name)
    plain = functools.partial(activation.activation, name=name)
    for shape in ((3, 5, 48), (2, 7, 17)):
        check(functools.partial(fast, run), plain, dtype, random(*shape, scale=4))
    # Same rank as above and with gradients, to avoid another compilation.
    extreme = torch.tensor([-3e4, -100.0, 0.0, 100.0, 3e4]).to(dtype).repeat(2, 2, 1).requires_grad_()
    torch.testing.assert_close(fast(run, extreme), plain(extreme))
    wide = torch.float32 if dtype == torch.float16 else dtype
    huge = torch.tensor([-3e13, 3e13]).to(wide).repeat(2, 2, 1).requires_grad_()
    fast(run, huge).backward(torch.ones_like(huge))
    assert torch.equal(huge.grad, torch.tensor([0.0, 1.0]).to(wide).expand(2, 2, 2))


@RUNS
def test_norms(run: Callable, how: str, dtype: torch.dtype) -> None:
    """The greatest common divisor of the number of rows and 64 is 2, 64 or 1; the first is compiled by default."""
    shapes = ((6, 5, 48), (64, 2, 48), (3, 5, 48))
    for shape in shapes[: 1 if how == "compiled" and dtype == torch.bfloat16 else 3]:
        x, weight, bias = random(*shape, scale=4), random(48, seed=2), random(48, seed=3)
        for fast, plain, *weights in (
            (cpu_norm.compiled_layer_norm, norm.layer_norm, weight, bias),
            (cpu_norm.compiled_rms_norm, norm.rms_norm, weight),
        ):
            check(
                lambda x, *ws, f=fast: f(run, x, *ws, 1e-5),
                lambda x, *ws, f=plain: f(x, *ws, 1e-5),
                dtype,
                x,
                *weights,
            )


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_norms_of_an_fp32_residual_stream(run: Callable) -> None:
    """The input is fp32 and the weights are bf16."""
    x, *weights = random(4, 8).float(), random(8).bfloat16(), random(8, seed=2).bfloat16()
    for fast, plain, count in (
        (cpu_norm.compiled_layer_norm, norm.layer_norm, 2),
        (cpu_norm.compiled_rms_norm, norm.rms_norm, 1),
    ):
        found = []
        for f in (functools.partial(fast, run), plain):
            inputs = [tensor.detach().requires_grad_() for tensor in (x, *weights[:count])]
            out = f(*inputs, 1e-5)
            out.backward(random(4, 8, seed=9).float())
            found.append([out, *(tensor.grad for tensor in inputs)])
        torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


@RUNS
def test_swiglu(run: Callable, dtype: torch.dtype) -> None:
    fast = functools.partial(cpu_activation.compiled_activation, run, name="swiglu")
    plain = functools.partial(activation.activation, name="swiglu")
    check(fast, plain, dtype, random(3, 5, 64, scale=4))


@pytest.mark.parametrize("name", ["relu", "geglu", "geglu_tanh", "gelu_tanh"])
def test_gradient_that_autograd_derives(name: str) -> None:
    """A function without a pair of its own, as every activation on a GPU."""
    function = activation.ACTIVATIONS[name]
    check(functools.partial(fused, eager, function), function, torch.float32, random(3, 5, 8))
    assert name == "gelu_tanh" or name not in cpu_activation.PAIRS


def test_compiled_gradient_that_autograd_derives(compiled: Compiler) -> None:
    fast = functools.partial(cpu_activation.compiled_activation, compiled, name="geglu")
    check(fast, activation.ACTIVATIONS["geglu"], torch.bfloat16, random(3, 5, 64, scale=4))


@RUNS
def test_rotary_emb(run: Callable, dtype: torch.dtype) -> None:
    cos, sin = rotary.rotary_angles(torch.arange(9).expand(2, 9), 12, 10000.0)
    fast = functools.partial(compiled_rotary_emb, run, cos=cos, sin=sin)
    plain = functools.partial(rotary.apply_rotary_emb, cos=cos, sin=sin)
    check(fast, lambda x: plain(x).double(), dtype, random(2, 3, 9, 16))


@pytest.mark.parametrize(
    ("how", "dtype", "causal", "heads", "groups"),
    [
        pytest.param(
            how,
            dtype,
            causal,
            *heads,
            # By default only one compiled case runs.
            marks=()
            if how == "eager" or (dtype == torch.bfloat16 and causal and heads == (4, 2))
            else pytest.mark.slow,
        )
        for how in ("eager", "compiled")
        for dtype in (torch.float32, torch.bfloat16)
        for causal in (True, False)
        for heads in ((4, 4), (4, 2), (3, 1))
    ],
)
def test_attention(run: Callable, dtype: torch.dtype, causal: bool, heads: int, groups: int) -> None:
    """Errors against fp64 are at most 1.4 times those of unfused attention in the same dtype.

    Gradients of keys and values sum over the query heads of a group in one product, with as many times the terms of one
    head. Rounding errors grow with the square root of their number.

    The lengths are one block, three blocks, and a length that is not a multiple of the block size, which alone is
    compiled by default.
    """
    settings = {"mask_bnst": None, "causal": causal, "dropout": 0.0}
    fast = functools.partial(cpu_attention.attention_by_blocks, run, **settings)
    plain = functools.partial(attention.attention, **settings)

    def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / 4
        if causal:
            scores = scores.masked_fill(~attention.causal_mask(*scores.shape[2:], CPU), -torch.inf)
        return scores.softmax(-1) @ v

    default = isinstance(run, Compiler) and dtype == torch.bfloat16 and causal and heads > groups > 1
    for length in (200,) if default else (128, 200, 384):
        q, k, v = (random(2, length, n, 16, seed=n).transpose(1, 2) for n in (heads, groups, groups))
        ours, theirs = (errors(f, plain, dtype, q, k, v) for f in (fast, unfused))
        grouped = max(1.4, (heads / groups) ** 0.5)
        bounds = (1.4, 1.4, grouped, grouped)
        assert all(a <= x * b for a, x, b in zip(ours, bounds, theirs, strict=True)), (ours, theirs)
    x = q.to(dtype).requires_grad_()
    assert type(fast(x, k.to(dtype), v.to(dtype)).grad_fn).__name__ == "_BlocksBackward"


@pytest.mark.parametrize("how", ["eager"])
@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("length", [40, 200])  # plain, and by blocks
def test_attention_of_values_of_another_width(run: Callable, length: int, width: int) -> None:
    q, k = random(2, 3, length, 16, seed=1), random(2, 3, length, 16, seed=2)
    v, grad = random(2, 3, length, width, seed=3), random(2, 3, length, width, seed=4)
    settings = {"mask_bnst": None, "causal": True, "dropout": 0.0}

    def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = ~attention.causal_mask(length, length, CPU)
        return (q @ k.transpose(2, 3) / 4).masked_fill(later, -torch.inf).softmax(-1) @ v

    results = []
    for function in (
        unfused,
        functools.partial(cpu_attention.attention_by_blocks, run, **settings),
        functools.partial(attention.attention, **settings),
    ):
        dtype = torch.float64 if function is unfused else torch.float32
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        out.backward(grad.to(dtype))
        results.append([out, *(x.grad for x in leaves)])
    exact, *found = results
    for each in found:
        for x, y in zip(each, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


def test_attention_with_a_mask_or_dropout_falls_back_to_plain() -> None:
    x = random(1, 2, 128, 8).bfloat16().requires_grad_()
    for settings in (
        {"mask_bnst": torch.ones(1, 1, 128, 128, dtype=torch.bool), "causal": True, "dropout": 0.0},
        {"mask_bnst": None, "causal": True, "dropout": 0.5},
    ):
        out = cpu_attention.attention_by_blocks(eager, x, x, x, **settings)
        assert type(out.grad_fn).__name__ != "_BlocksBackward"


def fused_loss(run: Callable, matmul: Callable, chunk_bytes: int, *args: object, **kwargs: object) -> Tensor:
    loss = linear_cross_entropy.LinearCrossEntropy(
        run=run,
        matmul=matmul,
        accumulate_wgrad=linear.accumulate_wgrad,
        chunk_bytes=chunk_bytes,
        piece_bytes=chunk_bytes // 4,
    )
    return loss(*args, **kwargs)


def plain_loss(x_sbh: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    logits = F.linear(x_sbh, weight, bias)[..., :vocab_size]
    return F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")


@RUNS
@pytest.mark.parametrize(
    ("known", "vocab_size"), [(False, 96), pytest.param(False, 90, marks=pytest.mark.slow), (True, 90)]
)
def test_linear_cross_entropy(run: Callable, dtype: torch.dtype, known: bool, vocab_size: int) -> None:
    """Its forward computes the same gradients, if it knows those of the losses."""
    chunk_bytes = 6 * 96 * dtype.itemsize  # six rows, which do not divide 35
    labels = torch.randint(vocab_size, (7, 5), generator=torch.Generator().manual_seed(2))

    def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused_loss(
            run,
            linear.matmul,
            chunk_bytes,
            x,
            weight,
            bias,
            labels,
            gradient_of((7, 5), dtype).float() if known else None,
            vocab_size=vocab_size,
            axis=ALONE,
            sequence_parallel=False,
        )

    # Rows of vocabulary padding must not contribute, whatever their values.
    weight = torch.cat((random(vocab_size, 32, seed=3), random(96 - vocab_size, 32, scale=1e3)))
    check(
        fast,
        lambda *inputs: plain_loss(*inputs, labels, vocab_size),
        dtype,
        random(7, 5, 32),
        weight,
        random(96, seed=4),
    )


def test_a_known_gradient_must_be_right() -> None:
    """Forward adds the weight's gradient to its sum, so a wrong one is an error; NaN stays NaN."""
    x, weight = random(4, 2, 8).float().requires_grad_(), random(16, 8).float().requires_grad_()
    labels, known = torch.zeros(4, 2, dtype=torch.long), torch.full((4, 2), 0.5)
    for told in (known, None):
        total = weight.main_grad = torch.zeros_like(weight)
        settings = {"vocab_size": 16, "axis": ALONE, "sequence_parallel": False}
        losses = fused_loss(eager, linear.matmul, 1 << 7, x, weight, None, labels, told, **settings)
        assert total.any() == (told is not None)
        if told is not None:
            with pytest.raises(RuntimeError, match="another gradient"):
                losses.backward(2 * known, retain_graph=True)
            assert torch.autograd.grad(losses, x, known * torch.nan, retain_graph=True)[0].isnan().all()
        losses.backward(known)
        expected = torch.autograd.grad(plain_loss(x, weight, None, labels, 16), weight, known)[0]
        torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_no_samples(run: Callable) -> None:
    """A replica gets empty batches at the end of an evaluation."""
    x, weight = torch.empty(4, 0, 8), random(16, 8).float()
    assert cpu_activation.compiled_activation(run, x, "gelu_tanh").shape == (4, 0, 8)
    assert cpu_activation.compiled_activation(run, x, "swiglu").shape == (4, 0, 4)
    assert cpu_norm.compiled_layer_norm(run, x, weight[0], weight[1], 1e-5).shape == x.shape
    assert cpu_norm.compiled_rms_norm(run, x, weight[0], 1e-5).shape == x.shape
    heads = torch.empty(0, 2, 128, 8)
    settings = {"mask_bnst": None, "causal": True, "dropout": 0.0}
    assert cpu_attention.attention_by_blocks(run, heads, heads, heads, **settings).shape == heads.shape
    for product in (
        linear.matmul,
        *([cpu_linear.onednn_matmul] if cpu_linear.has_onednn(torch.float32) else []),
    ):
        labels = torch.empty(4, 0, dtype=torch.long)
        losses = fused_loss(
            run,
            product,
            1 << 24,
            x,
            weight,
            None,
            labels,
            vocab_size=16,
            axis=ALONE,
            sequence_parallel=False,
        )
        assert losses.shape == (4, 0)


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak number of bytes that tensors allocate during a call."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


@pytest.mark.parametrize("known", [False, True])
def test_peak_memory_of_chunked_logits(known: bool) -> None:
    """Logits of one chunk exist, in fp32 those of a piece, twice."""
    rows, tokens = 12864, 2048
    weight = random(rows, 8).bfloat16().requires_grad_()

    def loss() -> None:
        x, labels = random(tokens, 8).bfloat16().requires_grad_(), torch.zeros(tokens, 1, dtype=torch.long)
        losses = fused_loss(
            eager,
            linear.matmul,
            1 << 22,
            x.unsqueeze(1),
            weight,
            None,
            labels,
            torch.ones(tokens, 1) if known else None,
            vocab_size=rows - 64,
            axis=ALONE,
            sequence_parallel=False,
        )
        losses.sum().backward()

    chunk, piece = 1 << 22, 1 << 20
    assert peak_bytes(loss) < 1.15 * (chunk + 2 * 2 * piece)


def skip_without_onednn(dtype: torch.dtype) -> None:
    if not cpu_linear.has_onednn(dtype):
        pytest.skip("this torch or this CPU has no oneDNN matmul for this dtype")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_matmul(dtype: torch.dtype) -> None:
    skip_without_onednn(dtype)
    x, weight, bias = random(3, 4, 24).to(dtype), random(10, 24, seed=2).to(dtype), random(10).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert (cpu_linear.onednn_matmul(x, weight, bias).double() - exact).abs().max() < TOLERANCE[
        dtype
    ] * exact.abs().max()
    transposed = cpu_linear.onednn_matmul(
        x[..., :10], weight.t()[:10].t()[:, :10].t(), None
    )  # as in backward
    assert torch.allclose(
        transposed, F.linear(x[..., :10], weight[:, :10].t()), rtol=TOLERANCE[dtype], atol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_is_bitwise_equal_for_few_and_many_rows(dtype: torch.dtype) -> None:
    """Few rows use the weight's own layout; many rows use oneDNN's."""
    skip_without_onednn(dtype)
    x, weight, bias = (
        random(*shape).to(dtype) for shape in ((cpu_linear.MIN_REORDER_ROWS, 512), (96, 512), (96,))
    )
    parts = [
        cpu_linear.onednn_matmul(part, weight, bias) for part in x.split(cpu_linear.MIN_REORDER_ROWS // 2)
    ]
    assert torch.equal(cpu_linear.onednn_matmul(x, weight, bias), torch.cat(parts))


def test_small_products_in_fp32_are_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of oneDNN costs more than it saves there. In bf16 torch calls oneDNN too."""
    skip_without_onednn(torch.float32)
    ops = choose_ops(OpsConfig(), work=1.0, dtype=torch.float32, device=CPU)
    calls = []

    def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append((x.dtype, len(x)))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(cpu_linear, "onednn_matmul", onednn)
    weight = torch.ones(1024, 256)
    for rows in (63, 64):
        ops.matmul(torch.ones(rows, 256), weight, None)
    ops.matmul(torch.ones(2, 256).bfloat16(), weight.bfloat16(), None)
    assert calls == [(torch.float32, 64), (torch.bfloat16, 2)]
    total, a, b = torch.zeros(8, 8), random(8, 600).float(), random(600, 8, seed=2).float()
    ops.accumulate_wgrad(total, a, b)
    assert torch.equal(total, torch.zeros(8, 8).addmm_(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [7, 2 * cpu_linear.WGRAD_ROWS + 7])
def test_onednn_accumulate_wgrad(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_onednn(dtype)
    monkeypatch.setattr(cpu_linear, "MIN_WGRAD_WORK", 0)
    total, a, b = (
        random(40, 24).float(),
        random(rows, 16, seed=2).to(dtype),
        random(rows, 24, seed=3).to(dtype),
    )
    exact = total.double()
    exact[8:24] += a.double().t() @ b.double()
    cpu_linear.accumulate_wgrad_by_size(total[8:24], a.t(), b)
    assert (total - exact).norm() < TOLERANCE[dtype] * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fused_accumulate_wgrad(dtype: torch.dtype) -> None:
    """Accumulates in fp32 without rounding to the dtype of the inputs, also into a slice of rows."""
    assert linear.has_fused_accumulate_wgrad(dtype, torch.device("cuda"))
    total, a, b = random(40, 24).float(), random(56, 16, seed=2).to(dtype), random(56, 24, seed=3).to(dtype)
    exact = total.double()
    exact[8:24] += a.double().t() @ b.double()
    on_gpu = total.cuda()
    linear.fused_accumulate_wgrad(on_gpu[8:24], a.cuda().t(), b.cuda())
    torch.testing.assert_close(on_gpu.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_calls_of_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with apex's signatures computes with torch, since the tests run without apex."""
    stand_in = types.ModuleType("apex.normalization.fused_layer_norm")
    stand_in.fused_layer_norm_affine = lambda x, weight, bias, shape, eps: F.layer_norm(
        x, shape, weight, bias, eps
    )
    stand_in.fused_rms_norm_affine = lambda x, weight, shape, eps: F.rms_norm(x, shape, weight, eps)
    for name in ("apex", "apex.normalization", stand_in.__name__):
        monkeypatch.setitem(sys.modules, name, stand_in)
    x, weight, bias = random(3, 4, 8).float(), random(8).bfloat16(), random(8, seed=2).bfloat16()
    assert torch.equal(apex.apex_layer_norm(x, weight, bias, 1e-5), norm.layer_norm(x, weight, bias, 1e-5))
    assert torch.equal(apex.apex_rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    stand_in.fused_layer_norm_affine = stand_in.fused_rms_norm_affine = (
        None  # apex is not called for empty inputs
    )
    assert apex.apex_layer_norm(x[:0], weight, bias, 1e-5).shape == x[:0].shape
    assert apex.apex_rms_norm(x[:0], weight, 1e-5).shape == x[:0].shape


def test_choice_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str) -> Ops:
        config = OpsConfig(ops_backend=name, torch_compile=False)
        cuda = torch.device("cuda")
        return choose_ops(
            config, work=1e12, dtype=torch.bfloat16, device=cuda, has_fused_wgrad=lambda *_: True
        )

    chosen = choose("auto")
    assert chosen.accumulate_wgrad is linear.fused_accumulate_wgrad
    assert chosen.layer_norm is norm.layer_norm
    assert chosen.notes == (
        "matmul: torch; wgrad: fused; norm: torch; loss: chunked",
        "torch.compile: off (--no-torch-compile)",
    )

    def run_compiled(function: Callable, *arguments: object) -> object:
        return function(*arguments)

    ops = choose_ops(
        OpsConfig(),
        work=1e12,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        find=lambda device: (run_compiled, "in a test"),
        has_fused_wgrad=lambda *_: False,
    )
    assert ops.run is ops.linear_cross_entropy.run is run_compiled
    assert "layer: compiled" in ops.kinds and not ops.recomputes_attention
    monkeypatch.setattr(Compiler, "check", lambda self, device: None)
    # On a GPU the sizes of the first call are constants, so that loads are aligned.
    for device, dynamic in ((torch.device("cuda"), None), (CPU, True)):
        assert find_compiler(device)[0].settings["dynamic"] is dynamic
    assert ops.kinds[-1] == "torch.compile: on"
    with pytest.raises(InputError, match="--ops-backend apex: apex is not installed"):
        choose("apex")
    monkeypatch.setattr(apex, "has_apex", lambda: True)
    assert choose("auto").layer_norm is norm.layer_norm  # apex is not preferred where it is installed
    assert choose("apex").layer_norm is apex.apex_layer_norm
    assert "norm: apex" in choose("apex").kinds


def test_a_compiler_failure_ends_the_run_with_one_line(compiled: Compiler, tmp_path: Path) -> None:
    """The compiler fails after the trial compilation at startup, for example because the disk is full."""
    broken = tmp_path / "g++"
    broken.write_text(
        "#!/bin/sh\ncase $* in *-dumpversion* | *--version*) exec g++ $@ ;; esac\n"
        "echo 'In file included from a.cpp:1:' >&2\n"
        "echo 'a.h:9: fatal error: error writing to a.o: No space left on device' >&2; exit 1\n"
    )
    broken.chmod(0o700)

    def tripled(x: Tensor) -> Tensor:
        return x * 3

    with torch._inductor.config.patch("cpp.cxx", (str(broken),)), pytest.raises(TrainingFault) as caught:
        compiled(tripled, torch.ones(3))
    assert str(caught.value) == (
        "torch.compile worked when the run started and now fails for tripled: a.h:9: fatal error: error writing "
        "to a.o: No space left on device; continue with --no-torch-compile"
    )

    def wrong(x: Tensor) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    compiled.compiled[wrong] = wrong  # errors raised by compiled code are not failures of the compiler
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        compiled(wrong, torch.ones(3))


def test_several_machines_compile_on_local_disks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for processes, folder in (("8", tmp_path / "megatron" / "compiled"), ("16", None)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        monkeypatch.setenv("WORLD_SIZE", processes)
        expected = folder or Path(tempfile.gettempdir()) / f"megatron-compiled-{os.getuid()}"
        assert compiler.cache_folder() == expected
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    Compiler()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(OSError, match="other users can write to it; set TORCHINDUCTOR_CACHE_DIR"):
        Compiler()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"  # each process compiles by itself


def test_choice_on_a_cpu(compiled: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(work: float = 1e12, **fields):
        return choose_ops(OpsConfig(**fields), work=work, dtype=torch.bfloat16, device=CPU)

    assert choose(ops_backend="plain") is PLAIN
    assert choose().activation is not PLAIN.activation
    assert (
        choose().layer_norm.func is cpu_norm.compiled_layer_norm
        and choose().rms_norm.func is cpu_norm.compiled_rms_norm
    )
    assert "norm: compiled" in choose().kinds and choose().notes[1].startswith("torch.compile: on, cache in ")
    if cpu_linear.has_onednn(torch.bfloat16):
        assert (choose().matmul, choose().accumulate_wgrad) == (
            cpu_linear.matmul_by_size,
            cpu_linear.accumulate_wgrad_by_size,
        )
        assert choose().attention is not PLAIN.attention
    assert choose(work=1e6).notes[1] == (
        "torch.compile: skipped, model too small to benefit (--ops-backend compile forces it)"
    )
    none = choose(torch_compile=False)
    assert none.activation is PLAIN.activation and none.linear_cross_entropy is not None
    assert none.notes[1] == "torch.compile: off (--no-torch-compile)"
    messages = []
    monkeypatch.setattr(compiler.logger, "debug", lambda text, *values: messages.append(text % values))
    assert choose(ops_backend="compile").activation is not PLAIN.activation
    assert messages[-1].startswith("torch.compile works")

    monkeypatch.setattr(compiler.Compiler, "check", lambda self, device: "no C++ compiler")
    assert "no C++ compiler" in choose().notes[1]
    with pytest.raises(InputError, match=r"torch\.compile does not work here: no C"):
        choose(ops_backend="compile")
    with pytest.raises(InputError, match="--ops-backend apex: apex needs a GPU"):
        choose(ops_backend="apex")
    with pytest.raises(InputError, match="--no-torch-compile exclude"):
        OpsConfig(ops_backend="compile", torch_compile=False)
