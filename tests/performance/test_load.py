"""--num-threads, and the warning when the machine is busier than its cores."""

from __future__ import annotations

import os

import pytest
import torch

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --num-layers 1
    --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-2 --eval-iters 0
    --train-iters 1
""".split()


def test_threads_and_load(pretrain, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    try:
        monkeypatch.setattr(os, "getloadavg", lambda: (9.5, 0, 0))
        out = pretrain(*TINY, "--num-threads", 3)
        assert torch.get_num_threads() == 3
        assert "warning: the load of this machine is 9.5 on 4 cores, so this run will be slow; " in out
        assert "lower --num-threads, now 3\n" in out
        monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 0, 0))
        assert "WARNING" not in pretrain(*TINY)
    finally:
        torch.set_num_threads(before)
