"""The call that entry points make."""

from __future__ import annotations

import faulthandler
import types

from megatron import plugins
from megatron.checkpoint.config import CheckpointConfig
from megatron.model.config import ModelConfig
from megatron.parallel.config import ParallelConfig
from megatron.pretrain_gpt import GPT


def test_a_run_prints_its_stacks_when_a_signal_ends_it(monkeypatch) -> None:
    config = types.SimpleNamespace(
        data=types.SimpleNamespace(padding_free=False),
        training=types.SimpleNamespace(device="cpu"),
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, max_position_embeddings=8),
        checkpoint=CheckpointConfig(),
        parallel=ParallelConfig(),
        plugin=lambda _: types.SimpleNamespace(
            dry_run=False, loss_mean="tokens", train_epochs=None, num_threads=None, cuda_graph=False
        ),
    )
    monkeypatch.setattr(faulthandler, "enable", lambda file: enabled.append(file))
    monkeypatch.setattr(plugins, "pretrain", lambda *_: len(enabled))
    enabled: list = []
    assert plugins.run(config, GPT) == 1
