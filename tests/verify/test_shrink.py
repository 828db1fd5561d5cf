"""Shrunk runs."""

from __future__ import annotations

import pytest

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.plugins import training_hooks  # noqa: F401 (importing it fills the registries)
from megatron.pretrain_gpt import DEFAULTS
from megatron.verify.shrink import (
    Layout,
    Shrunk,
    command_words,
    fitted_layout,
    in_layout,
    one_process,
    shrink,
)

RUN = """
    --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --seq-length 2048 --micro-batch-size 4
    --global-batch-size 512 --train-samples 100000 --lr 1e-4 --lr-warmup-samples 2000 --data-path corpus
    --vocab-file vocab.json --merge-file merges.txt --bf16
"""
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention"

DEEPSEEK = """
    --swiglu --normalization RMSNorm --position-embedding-type rope --multi-latent-attention --kv-lora-rank 512
    --qk-layernorm
"""


def parse(flags: str):
    return parse_run_config(f"{RUN} {flags}".split(), description="", defaults=DEFAULTS)


def shrunk(flags: str, processes: int, most: int = 8) -> Shrunk:
    return shrink(parse(flags), processes, most, steps=3)


@pytest.mark.parametrize(
    ("flags", "processes", "layout"),
    [
        ("", 1, Layout()),
        ("", 64, Layout(dp=2)),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 16, Layout(2, 2, 2)),
        ("--tensor-model-parallel-size 8", 64, Layout(tp=8)),
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8", 512, Layout(2, 4)),
    ],
)
def test_layouts(flags: str, processes: int, layout: Layout) -> None:
    small = shrunk(flags, processes)
    assert small.layout == layout
    assert small.config.model.hidden_size <= 128 and small.config.data.seq_length == 32
    assert "--data-path: corpus to none" in small.changes


def test_groups_and_ranks_keep_their_relation() -> None:
    """Two groups on four ranks stay fewer groups than ranks; 16 groups on two ranks stay several for each."""
    few = shrunk(f"{LLAMA} --num-query-groups 2 --tensor-model-parallel-size 4", 4).config.model
    assert (few.num_query_groups, few.num_attention_heads % 4) == (2, 0)
    many = shrunk(f"{LLAMA} --num-query-groups 16 --tensor-model-parallel-size 2", 4).config.model
    assert (many.num_query_groups, many.num_attention_heads) == (4, 8)


def test_the_padding_of_the_vocabulary_is_kept() -> None:
    for tp in (1, 2, 8):
        config = shrunk(f"--tensor-model-parallel-size {tp}", tp).config
        size = config.tokenizer.vocab_size + 1
        assert size % (config.tokenizer.make_vocab_size_divisible_by * tp)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        f"{LLAMA} --num-query-groups 2 --tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6",
        f"{DEEPSEEK} --q-lora-rank 512 --tensor-model-parallel-size 2 --sequence-parallel",
        f"{DEEPSEEK} --tensor-model-parallel-size 4",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 8 --fp32-residual-connection",
    ],
)
def test_command_lines_give_the_same_configuration(flags: str) -> None:
    small = shrunk(flags, 8)
    for config in (in_layout(small, small.layout), in_layout(small, Layout(dp=2)), one_process(small)):
        words = command_words(config)
        assert parse_run_config(words, description="", defaults=DEFAULTS) == config


def test_layouts_that_do_not_fit() -> None:
    small = shrunk("", 2)
    with pytest.raises(InputError, match="cannot be split over 3 tensor-parallel ranks"):
        in_layout(small, Layout(tp=3))
    with pytest.raises(InputError, match=r"4 layers do not divide into 3 pipeline stages"):
        in_layout(small, Layout(pp=3))
    with pytest.raises(InputError, match=r"^--processes: 6 is not a multiple of 4"):
        shrunk("--tensor-model-parallel-size 4", 6)


def test_sizes_are_divided_until_they_fit() -> None:
    assert fitted_layout(Layout(6, 5, 3), 8) == Layout(3, 1, 2)
    assert fitted_layout(Layout(1, 1, 100), 1) == Layout()
