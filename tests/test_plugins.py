"""The call that entry points make."""

from __future__ import annotations

import faulthandler

from megatron import plugins
from megatron.arguments import parse_run_config
from megatron.pretrain_gpt import GPT

FLAGS = """
    --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 9
"""


def test_a_run_prints_its_stacks_when_a_signal_ends_it(monkeypatch) -> None:
    monkeypatch.setattr(faulthandler, "enable", lambda file: enabled.append(file))
    monkeypatch.setattr(plugins, "pretrain", lambda *_: len(enabled))
    enabled: list = []
    assert plugins.run(parse_run_config(FLAGS.split(), description="", defaults={}), GPT) == 1
