"""A run of Megatron-LM v2.5, repeated from its initial weights on its data: the same log, digit for digit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from models import flat
from nvidia import v25_weights

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.saver import Saver
from megatron.model.config import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer

# Iteration, learning rate, loss and gradient norm, as Megatron-LM printed them.
LOG = """
    1  4.902E-04  1.646444E+01  5.923
    2  9.804E-04  1.638678E+01  5.780
    3  8.632E-04  1.581183E+01  5.658
    4  5.129E-04  1.582300E+01  5.177
    5  1.578E-04  1.575407E+01  5.051
    6  1.000E-05  1.536074E+01  5.111
"""
VALIDATION, TEST = "1.566344E+01", "1.526804E+01"
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --global-batch-size 4 --micro-batch-size 2 --train-iters 6 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine
    --lr-decay-iters 6 --lr-warmup-fraction 0.34 --weight-decay 0.01 --clip-grad 1.0 --adam-beta1 0.9
    --adam-beta2 0.95 --split 900,50,50 --no-bias-gelu-fusion --seed 1234 --attention-dropout 0
    --hidden-dropout 0 --eval-iters 1 --log-interval 1 --device cpu --no-mask-padded-vocab
""".split()


def test_equals_nvidias_log(pretrain, shared: Path, tmp_path: Path) -> None:
    vectors = shared / "vectors" / "gpt-v2.5"
    config = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=64)
    config = dataclasses.replace(config, bias_gelu_fusion=False, mask_padded_vocab=False)
    model = GPTModel(config, vocab_size=5000, padded_vocab_size=5120)
    buffer = flat(model)
    model.load_state_dict(v25_weights(vectors / "init_tp1"))
    state = {
        "iteration": 0,
        "consumed_samples": 0,
        "vocab_size": 5000,
        "padded_vocab_size": 5120,
        "task": "GPT",
    }
    state |= {"train_samples": 0, "evaluation_due": False, "bad_steps": 0, "history": [], "schedule": {}}
    state["config"] = {"model": dataclasses.asdict(config)}
    checkpoint = CheckpointConfig(save=str(tmp_path), save_optim=False)
    optimizer = Optimizer(buffer, OptimizerConfig(lr=1.0))
    Saver(checkpoint, buffer, optimizer, tokenizer_files={}, say=print).save(state)

    data = ["--data-path", vectors / "tiny60_text_document", "--data-cache-path", tmp_path / "cache"]
    data += ["--vocab-file", shared / "data" / "gpt2-tiny-vocab.json"]
    data += ["--merge-file", shared / "data" / "gpt2-tiny-merges.txt"]
    metrics = tmp_path / "metrics.jsonl"
    pretrain(*FLAGS, *data, "--load", tmp_path, "--finetune", "--metrics-path", metrics)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for expected, record in zip(LOG.split("\n")[1:-1], records, strict=False):
        iteration, rate, loss, norm = expected.split()
        assert record["iteration"] == int(iteration)
        assert f"{record['learning rate']:.3E}" == rate
        assert f"{record['grad norm']:.3f}" == norm
        # The last printed digit can fall to either side where rounding differs.
        assert record["lm loss"] == pytest.approx(float(loss), abs=1.01e-5)
    assert records[6]["lm loss validation"] == pytest.approx(float(VALIDATION), abs=1.01e-5)
    assert records[7]["lm loss test"] == pytest.approx(float(TEST), abs=1.01e-5)
