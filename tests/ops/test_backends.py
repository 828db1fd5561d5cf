"""Every fast form of an operation against the plain one in fp64, forward and backward, and what chooses them."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.flags import InputError, TrainingFault
from megatron.ops import activation, attention, compiler, linear, norm, projected_loss, rotary
from megatron.ops.backend import PLAIN, Ops, choose_ops
from megatron.ops.compiler import Compiler, as_written
from megatron.ops.config import OpsConfig
from megatron.parallel.mesh import ALONE

CPU = torch.device("cpu")
# What a few roundings in the dtype make.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Each variant takes seconds to compile: by default those of one dtype.
RUNS = pytest.mark.parametrize(
    ("how", "dtype"),
    [("as written", dtype) for dtype in TOLERANCE]
    + [
        pytest.param("compiled", dtype, marks=() if dtype == torch.bfloat16 else pytest.mark.slow)
        for dtype in TOLERANCE
    ],
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """Compiles for all tests, into a folder of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        run = Compiler()
        if (fault := run.check(CPU)) is not None:
            pytest.skip(f"torch.compile does not work here: {fault}")
        yield run


@pytest.fixture
def run(request: pytest.FixtureRequest, how: str) -> Callable:
    return as_written if how == "as written" else request.getfixturevalue("compiled")


def random(*shape: int, scale: float = 1.0, seed: int = 1) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(function: Callable, plain: Callable, dtype: torch.dtype, *inputs: Tensor) -> list[float]:
    """How far outputs and gradients of `function` in `dtype` are from those of `plain` in fp64, of the same rounded
    inputs, relative to their norms."""
    results = []
    for f, used in ((function, dtype), (plain, torch.float64)):
        xs = [x.to(dtype).to(used).requires_grad_() for x in inputs]
        out = f(*xs)
        out.backward(random(*out.shape, seed=9).to(dtype).to(out.dtype))
        results.append([out.detach(), *(x.grad for x in xs)])
    assert [x.shape for x in results[0]] == [x.shape for x in results[1]]
    return [
        ((ours.double() - theirs).norm() / theirs.norm()).item()
        for ours, theirs in zip(*results, strict=True)
    ]


def check(fast: Callable, plain: Callable, dtype: torch.dtype, *inputs: Tensor) -> None:
    """That `fast` in `dtype` gives what `plain` gives in fp64."""
    assert max(errors(fast, plain, dtype, *inputs)) <= TOLERANCE[dtype]


@RUNS
@pytest.mark.parametrize("tanh", [True, False])
def test_gelu(run: Callable, dtype: torch.dtype, tanh: bool) -> None:
    fast, plain = (functools.partial(f, tanh=tanh) for f in (activation.compiled_gelu, activation.gelu))
    for shape in ((3, 5, 48), (2, 7, 17)):
        check(functools.partial(fast, run), plain, dtype, random(*shape, scale=4))
    extreme = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 3e4]]).to(dtype)
    torch.testing.assert_close(fast(run, extreme), plain(extreme))
    huge = torch.tensor([[-3e13, 3e13]]).requires_grad_()
    fast(run, huge).sum().backward()
    assert torch.equal(huge.grad, torch.tensor([[0.0, 1.0]]))


@RUNS
def test_norms(run: Callable, dtype: torch.dtype) -> None:
    """Of rows that 64 divides, and of others; with weights in bf16 beside a residual stream in fp32."""
    for shape in ((3, 5, 48), (64, 2, 48)):
        x, weight, bias = random(*shape, scale=4), random(48, seed=2), random(48, seed=3)
        for fast, plain, *weights in (
            (norm.compiled_layer_norm, norm.layer_norm, weight, bias),
            (norm.compiled_rms_norm, norm.rms_norm, weight),
        ):
            check(
                lambda x, *ws, f=fast: f(run, x, *ws, 1e-5),
                lambda x, *ws, f=plain: f(x, *ws, 1e-5),
                dtype,
                x,
                *weights,
            )
    x, *weights = random(4, 8).float(), random(8).bfloat16(), random(8, seed=2).bfloat16()
    for fast, plain, count in (
        (norm.compiled_layer_norm, norm.layer_norm, 2),
        (norm.compiled_rms_norm, norm.rms_norm, 1),
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
    fast = functools.partial(activation.compiled_swiglu, run)
    check(fast, activation.swiglu, dtype, random(3, 5, 64, scale=4))


@RUNS
def test_rotate(run: Callable, dtype: torch.dtype) -> None:
    cos, sin = rotary.rotary_angles(torch.arange(9).expand(2, 9), 12, 10000.0)
    fast = functools.partial(rotary.compiled_rotate, run, cos=cos, sin=sin)
    plain = functools.partial(rotary.rotate, cos=cos, sin=sin)
    check(fast, lambda x: plain(x).double(), dtype, random(2, 3, 9, 16))


@pytest.mark.parametrize(
    ("how", "dtype", "causal", "heads", "groups"),
    [
        pytest.param(
            how,
            dtype,
            causal,
            *heads,
            # Compiled, by default one of them.
            marks=()
            if how == "as written" or (dtype == torch.bfloat16 and causal and heads == (4, 2))
            else pytest.mark.slow,
        )
        for how in ("as written", "compiled")
        for dtype in (torch.float32, torch.bfloat16)
        for causal in (True, False)
        for heads in ((4, 4), (4, 2), (3, 1))
    ],
)
def test_attention(run: Callable, dtype: torch.dtype, causal: bool, heads: int, groups: int) -> None:
    """As near to fp64 as products and a softmax in the same dtype. Lengths are a block, some, and one that ends within
    one."""
    settings = {"mask_bst": None, "causal": causal, "dropout": 0.0}
    fast = functools.partial(attention.attention_by_blocks, run, **settings)
    plain = functools.partial(attention.attention, **settings)

    def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / 4
        if causal:
            scores = scores.masked_fill(~attention.causal_mask(*scores.shape[2:], CPU), -torch.inf)
        return scores.softmax(-1) @ v

    for length in (128, 200, 384):
        q, k, v = (random(2, length, n, 16, seed=n).transpose(1, 2) for n in (heads, groups, groups))
        ours, theirs = (errors(f, plain, dtype, q, k, v) for f in (fast, unfused))
        assert all(a <= 1.4 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    x = q.to(dtype).requires_grad_()
    assert type(fast(x, k.to(dtype), v.to(dtype)).grad_fn).__name__ == "_BlocksBackward"


def test_attention_with_a_mask_or_dropout_is_plain() -> None:
    x = random(1, 2, 128, 8).bfloat16().requires_grad_()
    for settings in (
        {"mask_bst": torch.ones(1, 128, 128, dtype=torch.bool), "causal": True, "dropout": 0.0},
        {"mask_bst": None, "causal": True, "dropout": 0.5},
    ):
        out = attention.attention_by_blocks(as_written, x, x, x, **settings)
        assert type(out.grad_fn).__name__ != "_BlocksBackward"


def plain_loss(x_sbh: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    logits = F.linear(x_sbh, weight, bias)[..., :vocab_size]
    return F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")


@RUNS
@pytest.mark.parametrize(("kept", "vocab_size"), [(0, 96), (0, 90), (1 << 27, 90)])
def test_projected_loss(
    run: Callable, dtype: torch.dtype, kept: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projected_loss, "KEPT", kept)
    at_once = 6 * 96 * dtype.itemsize  # six rows, which do not divide 35
    labels = torch.randint(vocab_size, (7, 5), generator=torch.Generator().manual_seed(2))

    def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return projected_loss.projected_loss(
            run,
            linear.matmul,
            linear.add_product,
            at_once,
            x,
            weight,
            bias,
            labels,
            vocab_size=vocab_size,
            axis=ALONE,
            sequence=False,
        )

    # A padded vocabulary's rows play no part, whatever they hold.
    weight = torch.cat((random(vocab_size, 32, seed=3), random(96 - vocab_size, 32, scale=1e3)))
    check(
        fast,
        lambda *inputs: plain_loss(*inputs, labels, vocab_size),
        dtype,
        random(7, 5, 32),
        weight,
        random(96, seed=4),
    )


@pytest.mark.parametrize("how", ["as written", "compiled"])
def test_no_samples(run: Callable) -> None:
    """As a replica has them at the end of an evaluation."""
    x, weight = torch.empty(4, 0, 8), random(16, 8).float()
    assert activation.compiled_gelu(run, x, tanh=True).shape == (4, 0, 8)
    assert activation.compiled_swiglu(run, x).shape == (4, 0, 4)
    assert norm.compiled_layer_norm(run, x, weight[0], weight[1], 1e-5).shape == x.shape
    assert norm.compiled_rms_norm(run, x, weight[0], 1e-5).shape == x.shape
    heads = torch.empty(0, 2, 128, 8)
    settings = {"mask_bst": None, "causal": True, "dropout": 0.0}
    assert attention.attention_by_blocks(run, heads, heads, heads, **settings).shape == heads.shape
    for product in (linear.matmul, *([linear.onednn_matmul] if linear.has_onednn(torch.float32) else [])):
        labels = torch.empty(4, 0, dtype=torch.long)
        losses = projected_loss.projected_loss(
            run,
            product,
            linear.add_product,
            1 << 24,
            x,
            weight,
            None,
            labels,
            vocab_size=16,
            axis=ALONE,
            sequence=False,
        )
        assert losses.shape == (4, 0)


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes of tensors at the peak of a call, beyond those that were there before it."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def test_logits_at_once() -> None:
    """Of a vocabulary of 51,200, fewer bytes than an eighth of what the plain way holds, temporaries and all; and where
    the logits are kept for backward, no more than so many beside them."""
    weight = random(51264, 8).bfloat16().requires_grad_()

    def loss(tokens: int) -> None:
        x, labels = random(tokens, 8).bfloat16().requires_grad_(), torch.zeros(tokens, 1, dtype=torch.long)
        losses = projected_loss.projected_loss(
            as_written,
            linear.matmul,
            linear.add_product,
            1 << 24,
            x.unsqueeze(1),
            weight,
            None,
            labels,
            vocab_size=51200,
            axis=ALONE,
            sequence=False,
        )
        losses.sum().backward()

    bf16_and_fp32, few = 2048 * 51264 * (2 + 4), 512
    kept = few * 51264 * 2
    assert kept <= projected_loss.KEPT < 2048 * 51264 * 2
    assert 8 * peak_bytes(lambda: loss(2048)) < bf16_and_fp32
    assert 8 * (peak_bytes(lambda: loss(few)) - kept) < bf16_and_fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_matmul(dtype: torch.dtype) -> None:
    if not linear.has_onednn(dtype):
        pytest.skip("this torch or this CPU has no oneDNN for it")
    x, weight, bias = random(3, 4, 24).to(dtype), random(10, 24, seed=2).to(dtype), random(10).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert (linear.onednn_matmul(x, weight, bias).double() - exact).abs().max() < TOLERANCE[
        dtype
    ] * exact.abs().max()
    transposed = linear.onednn_matmul(
        x[..., :10], weight.t()[:10].t()[:, :10].t(), None
    )  # as backward has it
    assert torch.allclose(
        transposed, F.linear(x[..., :10], weight[:, :10].t()), rtol=TOLERANCE[dtype], atol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_gives_the_same_bits_for_few_rows_and_many(dtype: torch.dtype) -> None:
    """With a weight as it lies, and in the order of oneDNN."""
    if not linear.has_onednn(dtype):
        pytest.skip("this torch or this CPU has no oneDNN for it")
    x, weight, bias = (random(*shape).to(dtype) for shape in ((linear.REORDERED, 512), (96, 512), (96,)))
    parts = [linear.onednn_matmul(part, weight, bias) for part in x.split(linear.REORDERED // 2)]
    assert torch.equal(linear.onednn_matmul(x, weight, bias), torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [7, 2 * linear.SUMMED + 7])
def test_onednn_add_product(dtype: torch.dtype, rows: int) -> None:
    if not linear.has_onednn(dtype):
        pytest.skip("this torch or this CPU has no oneDNN for it")
    total, a, b = (
        random(40, 24).float(),
        random(rows, 16, seed=2).to(dtype),
        random(rows, 24, seed=3).to(dtype),
    )
    exact = total.double()
    exact[8:24] += a.double().t() @ b.double()
    linear.onednn_add_product(total[8:24], a.t(), b)
    assert (total - exact).norm() < TOLERANCE[dtype] * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_product_in_one(dtype: torch.dtype) -> None:
    """With no rounding to the dtype of the factors; of some rows of the sum, too."""
    assert linear.has_add_product_in_one(dtype, torch.device("cuda"))
    total, a, b = random(40, 24).float(), random(56, 16, seed=2).to(dtype), random(56, 24, seed=3).to(dtype)
    exact = total.double()
    exact[8:24] += a.double().t() @ b.double()
    on_gpu = total.cuda()
    linear.add_product_in_one(on_gpu[8:24], a.cuda().t(), b.cuda())
    torch.testing.assert_close(on_gpu.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_apex_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """apex is on no machine of these tests: a stand-in with its signatures computes by torch."""
    stand_in = types.ModuleType("apex.normalization.fused_layer_norm")
    stand_in.fused_layer_norm_affine = lambda x, weight, bias, shape, eps: F.layer_norm(
        x, shape, weight, bias, eps
    )
    stand_in.fused_rms_norm_affine = lambda x, weight, shape, eps: F.rms_norm(x, shape, weight, eps)
    for name in ("apex", "apex.normalization", stand_in.__name__):
        monkeypatch.setitem(sys.modules, name, stand_in)
    x, weight, bias = random(3, 4, 8).float(), random(8).bfloat16(), random(8, seed=2).bfloat16()
    assert torch.equal(norm.apex_layer_norm(x, weight, bias, 1e-5), norm.layer_norm(x, weight, bias, 1e-5))
    assert torch.equal(norm.apex_rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    stand_in.fused_layer_norm_affine = stand_in.fused_rms_norm_affine = None  # no samples are no work for it
    assert norm.apex_layer_norm(x[:0], weight, bias, 1e-5).shape == x[:0].shape
    assert norm.apex_rms_norm(x[:0], weight, 1e-5).shape == x[:0].shape


class StandIn(types.ModuleType):
    """What Transformer Engine's functions take and give, from 2.0 on, computed by torch."""

    def check(self, x: Tensor, weight: Tensor, margin: int, less_one: bool) -> None:
        assert (
            x.dim() == 2
            and x.is_contiguous()
            and x.dtype == weight.dtype
            and (margin, less_one) == (0, False)
        )

    def layernorm_fwd(
        self, input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma
    ):
        self.check(input, weight, sm_margin, zero_centered_gamma)
        assert bias.dtype == weight.dtype and (ln_out, quantizer, otype) == (None, None, str(input.dtype))
        x = input.float()
        mean, inverse = x.mean(-1), (x.var(-1, correction=0) + eps).rsqrt()
        out = (x - mean.unsqueeze(-1)) * inverse.unsqueeze(-1) * weight.float() + bias.float()
        return [out.to(input.dtype), mean, inverse]

    def layernorm_bwd(self, dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma, /):
        self.check(x, gamma, sm_margin, zero_centered_gamma)
        args = (mu.unsqueeze(-1), rsigma.unsqueeze(-1), gamma.float(), gamma.float(), [True] * 3)
        grads = torch.ops.aten.native_layer_norm_backward(dz.float(), x.float(), [x.shape[1]], *args)
        return [grad.to(x.dtype) for grad in grads]

    def rmsnorm_fwd(self, input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        self.check(input, weight, sm_margin, zero_centered_gamma)
        assert (ln_out, quantizer, otype) == (None, None, str(input.dtype))
        inverse = (input.float().square().mean(-1) + eps).rsqrt()
        out = input.float() * inverse.unsqueeze(-1) * weight.float()
        return [out.to(input.dtype), None, inverse]

    def rmsnorm_bwd(self, dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, /):
        self.check(x, gamma, sm_margin, zero_centered_gamma)
        normed = x.float() * rsigma.unsqueeze(-1)
        scaled = dz.float() * gamma.float()
        grad = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rsigma.unsqueeze(-1)
        return [grad.to(x.dtype), (dz.float() * normed).sum(0).to(x.dtype)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = types.ModuleType("transformer_engine.pytorch.constants")
    constants.TE_DType = {dtype: str(dtype) for dtype in TOLERANCE}
    for name in ("transformer_engine", "transformer_engine.pytorch", constants.__name__):
        monkeypatch.setitem(sys.modules, name, constants)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", StandIn("transformer_engine_torch"))


def check_te_norms(dtype: torch.dtype, device: str) -> None:
    """Transformer Engine's norms, of a dense input and of every third head, as of keys."""

    def of(function: Callable, device: str, step: int) -> Callable:
        def call(x: Tensor, *weights: Tensor) -> Tensor:
            return function(x.to(device)[:, ::step], *(w.to(device) for w in weights), 1e-5).cpu()

        return call

    x, weight, bias = random(4, 6, 64), random(64, seed=2), random(64, seed=3)
    for step in (1, 3, 6):
        for te, plain, weights in (
            (norm.te_layer_norm, norm.layer_norm, (weight, bias)),
            (norm.te_rms_norm, norm.rms_norm, (weight,)),
        ):
            check(of(te, device, step), of(plain, "cpu", step), dtype, x, *weights)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_transformer_engine_is_called_as_it_wants(stand_in: None, dtype: torch.dtype) -> None:
    check_te_norms(dtype, "cpu")
    # A residual stream in fp32, and no samples.
    x, weight = random(3, 8).float(), random(8).bfloat16()
    torch.testing.assert_close(norm.te_rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    assert norm.te_rms_norm(x[:0], weight, 1e-5).shape == (0, 8)
    assert norm.te_layer_norm(x[:0], weight, weight, 1e-5).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_transformer_engine_on_a_gpu(dtype: torch.dtype) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    check_te_norms(dtype, "cuda")


def test_what_a_gpu_has(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(backend: str) -> Ops:
        config = OpsConfig(ops_backend=backend, torch_compile=False)
        cuda = torch.device("cuda")
        return choose_ops(config, work=1e12, dtype=torch.bfloat16, device=cuda, adds=lambda *_: True)

    with pytest.raises(InputError, match=r"it is not installed; pip install .*transformer_engine\[pytorch\]"):
        choose("transformer-engine")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.13.0")
    with pytest.raises(InputError, match=r"of version 1\.13\.0, and has to be of 2\.0 or later; pip"):
        choose("transformer-engine")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.18.0")
    chosen = choose("transformer-engine")
    assert (chosen.layer_norm, chosen.rms_norm) == (norm.te_layer_norm, norm.te_rms_norm)
    assert chosen.add_product is linear.add_product_in_one
    assert "norms by Transformer Engine" in chosen.notes[0] and "Transformer Engine" in chosen.kinds
    assert choose("auto").layer_norm is norm.layer_norm  # it has to be asked for
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(InputError, match="cannot be used here: import of transformer_engine"):
        choose("transformer-engine")


def test_a_failure_of_the_compiler_ends_the_run_in_a_line(compiled: Compiler, tmp_path: Path) -> None:
    """One that comes after the trial at the start, as of a disk that has become full."""
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
        "torch.compile, which worked when the run started, cannot compile tripled: a.h:9: fatal error: error writing "
        "to a.o: No space left on device; add --no-torch-compile to go on without it"
    )

    def wrong(x: Tensor) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    compiled.compiled[wrong] = wrong  # what is wrong with code that is compiled is no fault of the compiler's
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        compiled(wrong, torch.ones(3))


def test_the_choice(compiled: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(work: float = 1e12, **fields):
        return choose_ops(OpsConfig(**fields), work=work, dtype=torch.bfloat16, device=CPU)

    assert choose(ops_backend="plain") is PLAIN
    assert choose().gelu is not PLAIN.gelu and choose().attention is not PLAIN.attention
    assert (
        choose().layer_norm.func is norm.compiled_layer_norm
        and choose().rms_norm.func is norm.compiled_rms_norm
    )
    assert "norms by compiled code" in choose().notes[0]
    if linear.has_onednn(torch.bfloat16):
        assert (choose().matmul, choose().add_product) == (linear.onednn_matmul, linear.onednn_add_product)
    assert "the model is small" in choose(work=1e6).notes[0]
    none = choose(torch_compile=False)
    assert none.gelu is PLAIN.gelu and none.projected_loss is not None
    assert "--no-torch-compile" in none.notes[0]
    told = []
    monkeypatch.setattr(compiler.logger, "info", lambda text, *values: told.append(text % values))
    assert choose(ops_backend="compile").gelu is not PLAIN.gelu
    assert told[-1].startswith("torch.compile works")

    monkeypatch.setattr(compiler.Compiler, "check", lambda self, device: "no C++ compiler")
    assert "no C++ compiler" in choose().notes[0]
    with pytest.raises(InputError, match=r"torch\.compile does not work here: no C"):
        choose(ops_backend="compile")
    with pytest.raises(InputError, match="--ops-backend apex: apex needs a GPU"):
        choose(ops_backend="apex")
    with pytest.raises(InputError, match="--ops-backend transformer-engine: Transformer Engine needs a GPU"):
        choose(ops_backend="transformer-engine")
    with pytest.raises(InputError, match="--no-torch-compile exclude"):
        OpsConfig(ops_backend="compile", torch_compile=False)
