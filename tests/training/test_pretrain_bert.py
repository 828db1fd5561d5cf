"""BERT training with most features enabled; the GPT tests cover the code that both share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron import plugins
from megatron.arguments import parse_run_config
from megatron.pretrain_bert import DEFAULTS, bert
from megatron.tokenizer.null import NullTokenizer
from megatron.variants.mock_data import MockBertDataset

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 40 --micro-batch-size 3 --global-batch-size 6 --train-iters 12 --lr 2e-3 --log-interval 1 --device cpu
    --eval-interval 4 --eval-iters 2 --bf16 --recompute-granularity full --spike-skip 100 --num-workers 0
"""


def run(folder: Path, more: str = "") -> list[dict]:
    flags = f"{FLAGS} --save {folder}/out --load {folder}/out --metrics-path {folder}/metrics.jsonl {more}"
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    assert plugins.run(config, bert(binary_head=config.data.bert_binary_head)) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def test_a_run_stopped_twice_resumes_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = run(tmp_path / "a")
    assert sum("lm loss" in row for row in whole) == 12
    assert sum("sop loss validation" in row for row in whole) == 3
    assert whole[-1].keys() >= {"lm loss test", "sop loss test"}
    run(tmp_path / "b", "--exit-interval 5 --async-save")
    run(tmp_path / "b", "--exit-interval 8")
    assert run(tmp_path / "b") == whole


def test_data_follow_the_seed() -> None:
    config = parse_run_config(f"{FLAGS} --seed 77".split(), description="", defaults=DEFAULTS)
    datasets = bert(binary_head=True).build_datasets(config, NullTokenizer(99), (5, 5, 0))
    for split, found in enumerate(list(datasets.values())[:2]):
        expected = MockBertDataset(5, config.data, vocab_size=100, seed=(77, split))
        for key, values in expected[3].items():
            assert np.array_equal(found[3][key], values)


def test_without_the_binary_head_there_is_one_loss(tmp_path: Path) -> None:
    rows = run(tmp_path, "--bert-no-binary-head")
    assert not any(name.startswith("sop") for row in rows for name in row)
