"""Order in which attention prefers its kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from megatron.ops.attention import attention, kernels
from megatron.parallel.recompute import recompute

GPU = torch.device("cuda", 0)
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WITH_CUDNN = [SDPBackend.CUDNN_ATTENTION, *WITHOUT_CUDNN]


def order() -> list[SDPBackend]:
    """Kernels that attention may use, the preferred one first."""
    with kernels(GPU):
        enabled = _cur_sdpa_kernel_backends()
        return [kernel for kernel in _cur_sdpa_kernel_backends(with_priority=True) if kernel in enabled]


def install_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """Pretend to have a GPU of a compute capability, of which torch and its compiler know the properties."""
    kind = torch.cuda._CudaDeviceProperties
    properties = object.__new__(kind)
    monkeypatch.setattr(kind, "major", major, raising=False)
    for name, value in (("_lazy_init", None), ("current_device", 0), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda _: properties, raising=False)


@pytest.mark.parametrize(("major", "expected"), [(8, WITHOUT_CUDNN), (9, WITH_CUDNN), (10, WITH_CUDNN)])
def test_order(monkeypatch: pytest.MonkeyPatch, major: int, expected: list[SDPBackend]) -> None:
    install_gpu(monkeypatch, major)
    assert order() == expected
    with torch.inference_mode():
        assert order() == WITHOUT_CUDNN


def test_recomputed_attention_prefers_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels draw their dropout in different ways."""
    install_gpu(monkeypatch, 9)
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(order())
        return x * 2

    recompute(run, torch.ones(3, requires_grad=True)).sum().backward()
    assert seen == [WITH_CUDNN, WITH_CUDNN]


@pytest.mark.parametrize("inference", [False, True])
def test_compiled_code_can_choose(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    install_gpu(monkeypatch, 9)

    def attend(x: Tensor) -> Tensor:
        with kernels(GPU):
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 8, 16)
    with torch.inference_mode(inference):
        torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(x), attend(x))


@pytest.mark.parametrize(
    ("dtype", "masked", "heads"),
    [(torch.bfloat16, False, 2), (torch.bfloat16, True, 8), (torch.float32, False, 8)],
)
def test_keys_of_grouped_queries(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masked: bool, heads: int
) -> None:
    """Keys are expanded to all heads where no kernel but the plain one, which writes all scores, takes groups."""
    install_gpu(monkeypatch, 9)
    given = []

    def record(q: Tensor, k: Tensor, v: Tensor, **more: object) -> Tensor:
        given.append((k.shape[1], v.shape[1], more["enable_gqa"]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(1, n, 4, 16, dtype=dtype, device=GPU) for n in (8, 2))
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=GPU) if masked else None
        attention(q, k, k, mask_bnst=mask, causal=True, dropout=0.0)
    assert given == [(heads, heads, heads != 8)]
