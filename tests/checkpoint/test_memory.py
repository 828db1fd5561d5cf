"""Loading needs little memory beyond the loaded state, also when the checkpoint was saved in another layout."""

from __future__ import annotations

import ctypes
import math
import re
from pathlib import Path

import pytest
from distributed import run_distributed
from models import CPU

from megatron.arguments import parse_run_config
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_into
from megatron.checkpoint.save import Saver
from megatron.parallel.mesh import init_mesh
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine

# 20 M parameters, 240 MB with Adam's moments.
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --num-layers 6 --hidden-size 512 --lr 2e-3
    --num-attention-heads 8 --seq-length 16 --micro-batch-size 2 --train-iters 20 --device cpu
"""
ZERO, TP = "--use-distributed-optimizer", "--tensor-model-parallel-size 2"


def load(root: str, flags: str, save_first: bool) -> tuple[int, int, int]:
    """Load a checkpoint; return temporary memory, size of the state and size of its largest tensor, in bytes."""
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = build_engine(config, GPT, mesh, vocab_size=2048, padded_vocab_size=2048)
        buffer, optimizer = engine.buffer, engine.optimizer
        filled = [buffer.params, *(piece for owned in optimizer.state.values() for piece in owned)]
        filled += [] if buffer.is_fp32 else buffer.masters
        for tensor in filled:
            tensor.fill_(1)  # the kernel allocates memory at the first write
        if save_first:
            state = {
                "task": "GPT",
                "iteration": 5,
                "consumed_samples": 10,
                "train_samples": 40,
                "bad_steps": 0,
            }
            state |= {"evaluation_due": False, "history": [], "vocab_size": 2048, "padded_vocab_size": 2048}
            state |= {"schedule": {}, "config": {}}
            Saver(CheckpointConfig(save=root), buffer, optimizer, tokenizer_files={}, log=print).save(state)
        checkpoint = find_checkpoint(root, None, world=mesh.world)
        peaks = []
        for _ in range(2):  # the first load also allocates what libraries keep from then on
            ctypes.CDLL(None).malloc_trim(0)  # memory kept by malloc would hide what the next load takes
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            before = memory("VmRSS")
            load_into(checkpoint, buffer, optimizer)
            peaks.append(memory("VmHWM") - before)
        largest = max(4 * math.prod(entry.shard_spec.local_shape) for entry in buffer.flat_params)
        return min(peaks), sum(tensor.nbytes for tensor in filled), largest


def memory(name: str) -> int:
    """Memory of this process in bytes: a field of /proc/self/status."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux measures the peak of memory")
def test_peak_memory_of_loading(tmp_path: Path) -> None:
    for processes, flags, save_first in ((4, f"{TP} {ZERO}", True), (2, f"{ZERO} --bf16", False)):
        for peak, share, largest in run_distributed(load, processes, str(tmp_path), flags, save_first):
            assert share > 75e6 and 0 < peak < 0.2 * share + largest, (flags, peak, share, largest)
