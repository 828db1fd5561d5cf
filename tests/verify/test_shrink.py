"""Shrunk runs."""

from __future__ import annotations

import pytest

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.plugins import training_hooks  # noqa: F401 (importing it fills the registries)
from megatron.pretrain_gpt import DEFAULTS
from megatron.recipes.config import FreezeConfig
from megatron.verify.layouts import Layout, fitted_layout
from megatron.verify.shrink import Shrunk, command_words, in_layout, one_process, shrink

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
# DeepSeek-V3's, with 48 layers.
MIXTURE = """
    --num-experts 256 --disable-bias-linear --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*45 --moe-router-load-balancing-type
    seq_aux_loss --moe-aux-loss-coeff 1e-4
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
        (f"{MIXTURE} --expert-model-parallel-size 64", 256, Layout(dp=8, ep=8)),
        (f"{MIXTURE} --expert-model-parallel-size 4", 256, Layout(dp=8, ep=4)),
        (
            f"{MIXTURE} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
            "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1",
            256,
            Layout(2, 2, 2, ep=4, etp=1),
        ),
    ],
)
def test_layouts(flags: str, processes: int, layout: Layout) -> None:
    small = shrunk(flags, processes)
    assert small.layout == layout
    assert small.config.model.hidden_size <= 128 and small.config.data.seq_length == 32
    assert not any("data-path" in change or "split" in change for change in small.changes)  # not covered


def test_groups_and_ranks_keep_their_relation() -> None:
    """Two groups on four ranks stay fewer groups than ranks; 16 groups on two ranks stay several for each."""
    few = shrunk(f"{LLAMA} --num-query-groups 2 --tensor-model-parallel-size 4", 4).config.model
    assert (few.num_query_groups, few.num_attention_heads % 4) == (2, 0)
    many = shrunk(f"{LLAMA} --num-query-groups 16 --tensor-model-parallel-size 2", 4).config.model
    assert (many.num_query_groups, many.num_attention_heads) == (4, 8)


def test_a_mixture_stays_a_mixture() -> None:
    small = shrunk(f"{MIXTURE} --expert-model-parallel-size 16", 64)
    assert small.config.training.precision == "fp32" and "--bf16: True to False" in small.changes
    model = small.config.model
    assert (model.num_experts, model.moe_router_topk) == (16, 6)
    assert (model.moe_router_num_groups, model.moe_router_group_topk) == (4, 3)
    assert (model.moe_ffn_hidden_size, model.moe_shared_expert_intermediate_size) == (16, 16)
    assert (model.num_layers, model.moe_layer_freq) == (4, "[0,1,1,1]")
    assert model.moe_router_enable_expert_bias and model.moe_aux_loss_coeff == (1e-4,)
    two = shrunk(f"{MIXTURE} --moe-layer-freq 3 --pipeline-model-parallel-size 2", 2).config.model
    assert two.expert_layers(two.num_layers) == [True, True, False, False]
    other = "--num-experts 6 --disable-bias-linear --moe-router-topk 1 --moe-router-pre-softmax"
    model = shrunk(f"{other} --expert-model-parallel-size 3", 3).config.model
    assert (model.num_experts, model.moe_router_topk, model.moe_layer_freq) == (6, 1, "1")


def test_windows_stay_windows() -> None:
    flags = "--window-size 511,0 --window-attn-skip-freq 6 --position-embedding-type rope --no-rope-freq [0]*23+[1]"
    model = shrunk(f"{flags} --num-layers 24 --pipeline-model-parallel-size 2", 2).config.model
    assert model.windows == [8, 8, 8, None]
    assert model.no_rope_freq == "[0,0,0,1]"


@pytest.mark.parametrize(
    ("pipeline", "layers", "layout", "schedule"),
    [
        ("Et*5|(t*6|)*6t*7,L", 48, "Ett|tt|tt|ttL", "1f1b"),
        ("Et|(t*6|)*14ttL", 87, "Et|tt|tt|tt|tt|tt|tt|ttL", "interleaved"),
        ("E|(t*8|)*6L", 48, "E|tt|tt|L", "1f1b"),
    ],
)
def test_parts_of_a_shrunk_pipeline(pipeline: str, layers: int, layout: str, schedule: str) -> None:
    """Four of eight stages are left, with as many parts per stage."""
    flags = f"--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --num-layers {layers}"
    small = shrunk(f"{flags} --pipeline-model-parallel-layout {pipeline}", 32)
    assert small.layout == Layout(2, 4) and small.parallel.pipeline_schedule == schedule
    assert small.parallel.pipeline_model_parallel_layout == layout
    assert small.config.model.num_layers == layout.count("t")


def test_ends_without_layers_get_one() -> None:
    pipeline = "--num-layers 2 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|t|t|L"
    small = shrunk(pipeline, 4, 2)
    assert small.parallel.pipeline_model_parallel_layout == "Et|L" and small.config.model.num_layers == 1


def test_frozen_parameters_that_are_left() -> None:
    """16 layers become 4: the embedding and layer 2 stay frozen."""
    freeze = "--num-layers 16 --freeze embedding.* decoder.layers.12.* decoder.layers.2.*"
    small = shrunk(freeze, 1)
    assert small.config.plugin(FreezeConfig).freeze == ("embedding.*", "decoder.layers.2.*")
    assert (
        "--freeze: embedding.* decoder.layers.12.* decoder.layers.2.* to embedding.* decoder.layers.2.*"
        in small.changes
    )
    assert shrunk("--num-layers 16 --freeze *.12.*", 1).config.plugin(FreezeConfig).freeze is None
    rope = "--num-layers 16 --mtp-num-layers 1 --position-embedding-type rope --freeze"
    for patterns in (("embedding.*", "decoder.*"), ("mtp.*",)):
        assert shrunk(f"{rope} {' '.join(patterns)}", 1).config.plugin(FreezeConfig).freeze == patterns
    rest = "--num-layers 16 --freeze embedding.* decoder.layers.[0-9].* decoder.final_layernorm.*"
    with pytest.raises(InputError, match=r"leaves no parameter to train in the small model of 4 layers"):
        shrunk(rest, 1)


def test_frozen_parameters_of_bert() -> None:
    run = parse("--freeze binary_head.* --position-embedding-type learned_absolute")
    small = shrink(run, 1, 1, 3, task="BERT")
    assert small.config.plugin(FreezeConfig).freeze == ("binary_head.*",)


def test_apex_is_replaced_on_a_cpu() -> None:
    small = shrunk("--ops-backend apex", 1)
    assert small.config.ops.ops_backend == "auto" and "--ops-backend: apex to auto" in small.changes


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
        f"{MIXTURE} --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
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
    mixture = shrunk(f"{MIXTURE} --expert-model-parallel-size 4", 4)
    with pytest.raises(InputError, match=r"^layout d8e8: .* 8 does not divide --num-experts 12"):
        in_layout(mixture, Layout(dp=8, ep=8))
    with pytest.raises(InputError, match=r"^layout d2e4: .* does not divide the 2 processes"):
        in_layout(mixture, Layout(dp=2, ep=4))
    with pytest.raises(InputError, match=r"^--processes: 6 is not a multiple of 4"):
        shrunk("--tensor-model-parallel-size 4", 6)


def test_sizes_are_divided_until_they_fit() -> None:
    assert fitted_layout(Layout(6, 5, 3), 8) == Layout(3, 1, 2)
    assert fitted_layout(Layout(1, 1, 100), 1) == Layout()
