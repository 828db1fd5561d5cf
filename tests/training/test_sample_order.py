"""The position in the data is a number of samples: a run resumes from it in any layout and with any batch size."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from distributed import run_distributed

from megatron.arguments import parse_run_config
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.variants.mock_data import MockGPTDataset

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 1 --hidden-size 16
    --num-attention-heads 2 --seq-length 8 --lr 1e-3 --eval-iters 0 --num-workers 0 --device cpu --train-samples 96
"""


def train(root: str, flags: str) -> list[int]:
    """Train on this rank and return the indices of the samples that it reads, in order."""
    read: list[int] = []
    real = MockGPTDataset.__getitem__
    MockGPTDataset.__getitem__ = lambda self, i: (read.append(i), real(self, i))[1]
    words = f"{FLAGS} {flags} --save {root} --load {root}".split()
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(parse_run_config(words, description="", defaults=DEFAULTS), GPT) == 0
    return read


def test_every_sample_is_read_once_and_in_order(tmp_path: Path) -> None:
    parts = [
        (1, 2, "--global-batch-size 4 --exit-interval 3"),
        (2, 1, "--global-batch-size 8 --exit-interval 5"),
        (1, 2, "--global-batch-size 8 --rampup-batch-size 2 2 40 --exit-interval 9"),
        (2, 2, "--global-batch-size 12"),
    ]
    order: list[int] = []
    for replicas, micro, flags in parts:
        ranks = run_distributed(train, replicas, str(tmp_path), f"--micro-batch-size {micro} {flags}")
        order += [
            sample
            for start in range(0, len(ranks[0]), micro)
            for read in ranks
            for sample in read[start : start + micro]
        ]
    # 3 batches of 4, 2 of 8, 2 of 6 and 2 of 8 during the ramp, and 3 of 12, all that fit into 96 samples.
    assert order == list(range(12 + 16 + 12 + 16 + 36))
