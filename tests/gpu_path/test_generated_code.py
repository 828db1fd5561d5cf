"""Triton code of compiled layers for a stand-in H100: no masks, no indices that overflow, vector loads, registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_path.compiled_trace import CPU, Compiled, compiled_function, compiled_layer
from gpu_path.generated_code import LARGE, Kernel, kernels, masked, narrow_index, narrow_numbers
from gpu_path.golden import COMMON, SHAPES, compiled
from torch import Tensor

from megatron.arguments import parse_run_config
from megatron.ops import linear_cross_entropy
from megatron.parallel.random import DropoutKey, dropout
from megatron.performance.compiled_layer import device_keys
from megatron.pretrain_gpt import DEFAULTS

EACH_SHAPE = pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=() if s == "GPT-2" else pytest.mark.slow) for s in SHAPES]
)


def kernels_of(found: Compiled) -> list[Kernel]:
    return [kernel for code in found.code for kernel in kernels(code)]


def kernel_of(function: Callable, *inputs: object) -> Kernel:
    (kernel,) = kernels_of(compiled_function(function, *inputs))
    return kernel


@EACH_SHAPE
def test_kernels_over_activations_have_no_masks(shape: str) -> None:
    """Pointers and sizes are divisible by 16, which lets a thread load 16 bytes at once."""
    large = [kernel for kernel in kernels_of(compiled(shape)) if kernel.sizes.get("xnumel", 0) >= LARGE]
    assert large
    for kernel in large:
        assert not masked(kernel), kernel.source
        assert kernel.divisible == len(kernel.signature), kernel.name


@EACH_SHAPE
def test_indices_do_not_overflow(shape: str) -> None:
    for kernel in kernels_of(compiled(shape)):
        assert narrow_numbers(kernel) == []
        assert not narrow_index(kernel)


def test_masks_are_found() -> None:
    kernel = kernel_of(lambda x: x * 2, torch.empty(1023, 1025))
    assert masked(kernel)
    assert kernel.divisible < len(kernel.signature)


def drop(x: Tensor, rank: int | None) -> Kernel:
    """Kernel of dropout of an activation's part, and of an addition as in a layer."""
    (key,) = device_keys([DropoutKey(1, 0)], 1, CPU)
    return kernel_of(lambda x, key: x + dropout(x, 0.1, key, "mlp", rank), x, key.at_layer(0))


def test_dropout_counts_elements_in_64_bits() -> None:
    """With sequence parallelism a rank's first element may have a number beyond 32 bits."""
    assert narrow_numbers(drop(torch.empty(1024, 8, 1024), rank=300)) == []
    assert not narrow_index(drop(torch.empty(2**31 // 1024 + 16, 1024, dtype=torch.bfloat16), rank=None))


def test_an_index_that_overflows_is_found() -> None:
    kernel = kernel_of(lambda x: torch.arange(len(x)) * 0xD256D193 * x, torch.empty(2**20, dtype=torch.int64))
    assert len(narrow_numbers(kernel)) == 1


def test_the_loss_reads_its_logits_once() -> None:
    """One loop computes the maximum of a row and the sum of its exponentials."""
    logits, index = torch.empty(1024, 50304, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.int64)
    valid = torch.empty(50304, dtype=torch.bool)
    statistics = compiled_function(linear_cross_entropy._statistics, logits, index, valid)
    loops = [kernel.source.count("for r0_offset") for kernel in kernels_of(statistics)]
    assert loops == [1, 0]  # the second kernel reads the labels' logits


@pytest.mark.slow
def test_a_layer_of_more_than_2_to_the_31_elements() -> None:
    flags = f"{COMMON} --num-layers 1 --seq-length 16400 --micro-batch-size 32 --global-batch-size 32"
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    found = kernels_of(compiled_layer(config, causal=True))
    assert sum(kernel.work >= 2**31 for kernel in found) >= 2  # GELU, its gradient with the bias of the MLP
    for kernel in found:
        assert narrow_numbers(kernel) == []
        assert not narrow_index(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["GPT-2", "Llama"])
def test_ptx(shape: str, tmp_path: Path) -> None:
    """A thread loads and stores vectors of at least 8 bytes, and keeps its values in registers."""
    folder = os.environ.get("TRITON")
    if folder is None:
        pytest.skip("needs TRITON, a folder with triton's wheel unpacked, which compiles without a GPU")
    large = [kernel for kernel in kernels_of(compiled(shape)) if kernel.sizes.get("xnumel", 0) >= LARGE // 8]
    kernels_file = tmp_path / "kernels.json"
    kernels_file.write_text(json.dumps([[kernel.name, kernel.text] for kernel in large]), encoding="utf-8")
    script = Path(__file__).with_name("ptx.py")
    done = subprocess.run(
        [sys.executable, str(script), str(kernels_file)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout).items():
        # Besides them are the statistics of rows, which each thread loads.
        assert found["bytes of vectors"] > 0.75 * found["bytes"], (name, found)
        assert found["spilled"] == 0, (name, found)
        assert found["registers"] <= 128, (name, found)
