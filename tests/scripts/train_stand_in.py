"""benchmarks/train.py without a GPU: it compares the sides of a GPU, which run tiny models on the CPU.

gpu.sh calls it in place of benchmarks/train.py in test_gpu.py, with benchmarks/ and tests/ on PYTHONPATH. Its figures
mean nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch
import train
from cuda_graphs import CUDA_GRAPHS
from parallel_workers import Workers
from train_sides import SIZES, matmul_rate, ours

from megatron.cli import run_command

# The processes of the sides import this file, too.
for name, value in CUDA_GRAPHS.items():
    setattr(torch.cuda, name, value)


def workers(
    measure: Any, processes: int, device: str, size: Any, precision: str, *arguments: Any, **settings: Any
) -> Workers:
    assert device == "cuda"
    assert multiprocessing.active_children() == []  # the memory of a GPU holds one program
    if measure is ours and not arguments:
        arguments = ("--ops-backend", "layers")  # the default of a GPU
    if measure is matmul_rate:
        precision = "fp32"  # some CPUs take seconds for a large product in bf16
    return Workers(measure, processes, "cpu", SIZES["tiny"], precision, *arguments, **settings)


if __name__ == "__main__":
    torch.cuda.get_device_name = lambda: "NVIDIA H100 80GB HBM3"
    torch.cuda.get_device_capability = lambda: (9, 0)
    train.Workers = workers
    run_command(lambda: train.main([*sys.argv[1:], "--rounds", "1"]))
