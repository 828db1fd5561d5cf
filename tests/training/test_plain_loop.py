"""Training matches a plain PyTorch loop on the same data in the same order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_gpt import PlainGPT, train
from safetensors.torch import load_file

from megatron.commands import preprocess_data
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets

SIZES = {"vocab_size": 5000, "width": 64, "heads": 4, "layers": 2, "length": 64}
STEPS = 60
FLAGS = f"""
    --num-layers {SIZES["layers"]} --hidden-size {SIZES["width"]} --num-attention-heads {SIZES["heads"]}
    --seq-length {SIZES["length"]} --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 4 --global-batch-size 8 --train-iters {STEPS}
    --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 10
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
    --split 1,0,0 --eval-iters 0 --log-interval 1 --device cpu
""".split()


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_matches_a_plain_loop(command, pretrain, shared: Path, tmp_path: Path, replicas: int) -> None:
    tokenizer = [
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", shared / "data" / "gpt2-tiny-vocab.json"),
        *("--merge-file", shared / "data" / "gpt2-tiny-merges.txt"),
    ]
    text = shared / "data" / "wt2-train.txt"
    prefix = tmp_path / "wt2"
    preprocess = ["--input", text, "--output-prefix", prefix, "--append-eod", *tokenizer]
    preprocess_data.main([str(word) for word in preprocess])
    prefix = tmp_path / "wt2_text_document"
    metrics = tmp_path / "metrics.jsonl"
    common = [*FLAGS, *tokenizer, "--data-path", prefix]
    if replicas == 1:
        pretrain(*common, "--metrics-path", metrics)
    else:
        command("pretrain_gpt.py", *common, "--metrics-path", metrics, replicas=replicas)
    ours = [json.loads(line) for line in metrics.read_text().splitlines()]
    # The first step has learning rate 0, so a checkpoint after it holds the initial weights.
    pretrain(*common, "--save", tmp_path / "start", "--exit-interval", 1)
    model = PlainGPT(**SIZES)
    model.load_weights(load_file(tmp_path / "start" / "iter_0000001" / "model.safetensors"))

    config = DataConfig(data_path=(str(prefix),), split="1,0,0", seq_length=SIZES["length"])
    dataset = build_gpt_datasets(config, samples=(8 * STEPS, 0, 0), seed=1234, vocab_size=5000, eod=None)[
        "train"
    ]
    batches = (
        torch.from_numpy(np.stack([dataset[8 * step + i]["text"] for i in range(8)])) for step in range(STEPS)
    )
    theirs = list(
        train(model, batches, steps=STEPS, lr=1e-3, min_lr=1e-5, warmup=10, weight_decay=0.1, clip=1.0)
    )
    assert len(ours) == len(theirs) == STEPS
    for record, (loss, norm) in zip(ours, theirs, strict=True):
        assert record["lm loss"] == pytest.approx(loss, abs=1e-4), record["iteration"]
        assert record["grad norm"] == pytest.approx(norm, rel=1e-3), record["iteration"]
    assert theirs[-1][0] < theirs[0][0] - 1.0
