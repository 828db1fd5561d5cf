"""A second stage that extends a trained model: longer sequences, another RoPE, another blend."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import differences, model_config
from megatron.checkpoint.find import find_checkpoint
from megatron.commands.convert_checkpoint import main as convert
from megatron.commands.evaluate import main as evaluate
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.inference.conversion import largest_difference, our_logits, their_logits
from megatron.model.config import ModelConfig

IDS = 120
RUN = f"""
    --device cpu --tokenizer-type NullTokenizer --vocab-size {IDS} --num-workers 0 --lr 1e-2 --lr-decay-style cosine
    --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --log-interval 1 --split 1,0,0 --ops-backend plain
    --attention-dropout 0 --hidden-dropout 0
""".split()
LLAMA = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
""".split()
YARN = """
    --use-rope-scaling --rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-length 16
""".split()
SHORT = [*RUN, *LLAMA, "--seq-length", 16, "--train-iters", 6]
LONG = ["--finetune", "--seq-length", 64, "--train-iters", 3]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Token files of short and of long documents."""
    rng = np.random.default_rng(3)
    for name, length in (("short", 20), ("long", 150)):
        with IndexedDatasetWriter(str(tmp_path / name), np.uint16) as writer:
            for _ in range(30):
                # Every token is the one before it plus 1 to 3, so that there is something to learn.
                steps = rng.integers(1, 4, size=length)
                writer.add_document([(np.cumsum(steps) % IDS).astype(np.uint16)])
    return [tmp_path / "short", tmp_path / "long"]


@pytest.fixture
def first(pretrain: Callable[..., str], files: list[Path], tmp_path: Path) -> Path:
    """The folder of a trained model."""
    pretrain(*SHORT, "--data-path", files[0], "--save", tmp_path / "first")
    return tmp_path / "first"


def exported(load: Path, save: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    convert(["--from", "native", "--to", "huggingface", "--load", str(load), "--save", str(save)])
    capsys.readouterr()
    return save


def their_losses(folder: Path, tokens_bs: Tensor, **rope: Any) -> Tensor:
    """The losses [b, s - 1] of an exported model in transformers, with other parameters of RoPE if any are given."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    if rope:
        config.rope_parameters, config.max_position_embeddings = rope, tokens_bs.shape[1]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        logits_bvs = model(tokens_bs[:, :-1]).logits.transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits_bvs, tokens_bs[:, 1:], reduction="none")


@pytest.mark.parametrize(
    ("flags", "rope"),
    [
        (
            YARN,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
            },
        ),
        pytest.param(
            ["--rotary-base", "500000"],
            {"rope_type": "default", "rope_theta": 500000.0},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["yarn", "base"],
)
def test_a_second_stage(
    pretrain: Callable[..., str],
    files: list[Path],
    first: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    rope: dict[str, Any],
) -> None:
    """Starts from the weights alone, with the loss that transformers computes, and is exported as it was trained."""
    blend = [str(files[0]), "from=6", "1", str(files[0]), "3", str(files[1])]
    out = pretrain(
        *[*RUN, "--load", first, "--save", tmp_path / "second", "--use-checkpoint-args"],
        *[*LONG, *flags, "--data-path", *blend],
    )
    assert "training: iterations 1 to 3 of 4 samples, from the weights of" in out
    assert "note: RoPE differs from that of" in out and f"{flags[0]} (checkpoint:" in out
    assert "the checkpoint was trained on" not in out
    assert "data phase 2 from sample 7 on, in iteration 2" in out
    rows = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    # The decay begins anew, over the three iterations of this stage. The rates are those of the next iteration.
    assert [row["learning rate"] for row in rows] == pytest.approx([7.5e-3, 2.5e-3, 0], rel=1e-6)

    config = DataConfig(seq_length=64, data_path=tuple(blend), split="1,0,0")
    data = build_gpt_datasets(config, samples=(12, 0, 0), seed=1234, vocab_size=IDS + 1)["train"]
    tokens = torch.from_numpy(np.stack([data[i]["text"] for i in range(4)]))
    expected = their_losses(exported(first, tmp_path / "hf1", capsys), tokens, **rope).mean()
    assert rows[0]["lm loss"] == pytest.approx(expected.item(), abs=1e-5)

    saved = find_checkpoint(str(tmp_path / "second"), None)
    assert model_config(saved).max_position_embeddings == 64 and saved.state["consumed_samples"] == 12
    written = exported(tmp_path / "second", tmp_path / "hf2", capsys)
    assert largest_difference(our_logits(saved), their_logits(written, saved)) < 1e-5
    settings = json.loads((written / "config.json").read_text())
    assert settings["max_position_embeddings"] == 64
    assert rope.items() <= settings["rope_parameters"].items()


@pytest.mark.slow
def test_evaluation_by_context(
    pretrain: Callable[..., str],
    files: list[Path],
    first: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The losses at the positions of the longer windows equal those of transformers."""
    pretrain(
        *[*RUN, "--load", first, "--save", tmp_path / "second", "--use-checkpoint-args"],
        *[*LONG, *YARN, "--data-path", files[1]],
    )
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(3 * i % IDS) for i in range(128)))
    words = f"--load {tmp_path / 'second'} --task PPL --valid-data {text} --device cpu --by-context"
    evaluate([*words.split(), "--output-path", str(tmp_path / "result.json")])
    assert "33 to        64 tokens of context: loss" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    stream = torch.tensor([IDS, *(3 * i % IDS for i in range(128))])
    windows = torch.stack([stream[0:65], stream[64:129]])
    losses = their_losses(exported(tmp_path / "second", tmp_path / "hf", capsys), windows)
    bounds = [0, 1, 2, 4, 8, 16, 32, 64]
    found = [(r["first"], r["last"], r["tokens"], r["loss"]) for r in result["by context"]]
    assert [row[:3] for row in found] == [(a + 1, b, 2 * (b - a)) for a, b in itertools.pairwise(bounds)]
    assert [row[3] for row in found] == pytest.approx(
        [losses[:, a:b].mean().item() for a, b in itertools.pairwise(bounds)], abs=1e-5
    )
    with pytest.raises(InputError, match="--by-context: LAMBADA has no loss"):
        evaluate([*words.replace("PPL", "LAMBADA").split()])


def test_what_may_not_change_is_refused(
    pretrain: Callable[..., str], files: list[Path], first: Path, tmp_path: Path
) -> None:
    base = [*RUN, "--load", first, "--data-path", files[0], "--train-iters", 8]
    with pytest.raises(
        InputError,
        match=r"another model: --rotary-base \(checkpoint: 10000.0, given: 5000.0\); RoPE may change with --finetune",
    ):
        pretrain(*base, *LLAMA, "--seq-length", 16, "--rotary-base", 5000)
    with pytest.raises(InputError, match=r"another model: --rotary-percent \(checkpoint: 1.0, given: 0.5\)$"):
        pretrain(*base, *LLAMA, *LONG, "--rotary-percent", 0.5)
    with pytest.raises(InputError, match=r"another model: --num-query-groups \([^;]*\)$"):
        pretrain(*base, *LLAMA, *LONG, "--num-query-groups", 4, "--rotary-base", 5000)
    out = pretrain(*base, *LLAMA, *LONG, *YARN[:-1], 32)
    assert "; checkpoint trained on 16 positions; --rope-scaling-original-length is 32" in out
    # Without --finetune the checkpoint's RoPE wins, and the run goes on with its optimizer, longer samples, other data.
    out = pretrain(
        *[*RUN, "--load", first, "--train-iters", 8, "--use-checkpoint-args", "--seq-length", 32],
        *["--rotary-base", 5000, "--data-path", files[0], "from=24", files[1]],
    )
    assert ", --seq-length changed from 16 to 32" in out and "the run was started for 24 samples" in out
    assert "training: iterations 7 to 8" in out and f"data phase 2: samples 25 to 32: {files[1]}" in out


def test_learned_positions_keep_their_length(
    pretrain: Callable[..., str], files: list[Path], tmp_path: Path
) -> None:
    gpt = [*RUN, "--num-layers", 1, "--hidden-size", 16, "--num-attention-heads", 2, "--data-path", files[0]]
    pretrain(*gpt, "--seq-length", 16, "--train-iters", 1, "--save", tmp_path / "gpt")
    with pytest.raises(InputError, match=r"--max-position-embeddings \(checkpoint: 16, given: 64\)$"):
        pretrain(*gpt, *LONG, "--load", tmp_path / "gpt")
    with pytest.raises(InputError, match="--seq-length: 64 is longer than --max-position-embeddings 16"):
        pretrain(*gpt, *LONG, "--load", tmp_path / "gpt", "--use-checkpoint-args")


def test_nvidias_format_of_export_has_no_rope(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"Megatron-LM v2\.5 supports only"):
        convert(["--from", "native", "--to", "megatron", "--load", str(first), "--save", str(tmp_path / "n")])


def test_flags_of_rope_without_rope_are_no_part_of_a_model() -> None:
    """Runs that gave them before they were refused can be resumed without them."""
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
    }
    plain, based = ModelConfig(**sizes), ModelConfig(**sizes, rotary_base=5e5, use_rope_scaling=True)
    assert differences(plain, based, is_bert=False) == []
    rope = [dataclasses.replace(config, position_embedding_type="rope") for config in (plain, based)]
    flags = [flag for flag, _, _ in differences(*rope, is_bert=False)]
    assert flags == ["--rotary-base", "--use-rope-scaling"]
