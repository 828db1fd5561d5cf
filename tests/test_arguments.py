"""The command line of a training run: Megatron-LM's names and defaults, config files, and errors."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.arguments import parse_run_config, run_parser
from megatron.cli import OTHER_NAMES, Parser, run_command, summary
from megatron.errors import InputError, TrainingFault, TransientFault
from megatron.flags import Flag, field_types, flag_name
from megatron.interop.nvidia.flags import OURS_ALONE
from megatron.recipes.config import LossScaleConfig, RampUpConfig
from megatron.training.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent

# Flags that a run requires.
BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-3"
)

# Megatron-LM v2.5, examples/pretrain_gpt.sh.
GPT_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8
    --seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000
    --save checkpoints/gpt --load checkpoints/gpt --data-path my-gpt2_text_document
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1
    --distributed-backend nccl --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2
    --clip-grad 1.0 --lr-warmup-fraction .01 --checkpoint-activations --log-interval 100
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
"""


def parse(*flags: str, base: str = BASE) -> RunConfig:
    """Parse the words of `base` and `flags`."""
    words = [word for flag in (base, *flags) for word in flag.split()]
    return parse_run_config(words, description="a test", defaults={})


def error_of(*words: str) -> str:
    """Return the error message for `BASE` followed by `words`."""
    with pytest.raises(InputError) as error:
        parse_run_config([*BASE.split(), *words], description="a test", defaults={})
    return str(error.value)


def all_flags() -> Iterator[tuple[str, dataclasses.Field, type]]:
    """Yield each flag of a run: its section of the configuration, its field and its scalar type."""
    for part, config in RunConfig.section_types().items():
        scalar_types = field_types(config)
        for field in dataclasses.fields(config):
            yield part, field, scalar_types[field.name]


VALUED = {
    flag_name(field): (field.metadata["flag"], kind) for _, field, kind in all_flags() if kind is not bool
}
NUMBERS = {name: (spec, kind) for name, (spec, kind) in VALUED.items() if kind in (int, float)}
CHOICES = {name: spec for name, (spec, _) in VALUED.items() if spec.choices is not None}


# ---- valid command lines


def test_the_example_of_gpt_345m(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(base=GPT_345M)
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (24, 1024, 16)
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (4096, 64, 16)
    assert (config.data.seq_length, model.max_position_embeddings) == (1024, 1024)
    assert (training.micro_batch_size, training.global_batch_size) == (4, 8)
    assert (training.train_iters, training.train_samples) == (500_000, None)
    assert (training.fp16, training.eval_interval, training.eval_iters) == (True, 1000, 10)
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_decay_style) == (1.5e-4, 1e-5, "cosine")
    assert (optimizer.lr_decay_iters, optimizer.lr_warmup_fraction) == (320_000, 0.01)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.01, 1.0)
    assert config.data.data_path == ("my-gpt2_text_document",)
    assert config.data.split == "949,50,1"
    assert config.tokenizer.vocab_file == "gpt2-vocab.json"
    assert config.tokenizer.merge_file == "gpt2-merges.txt"
    assert (config.checkpoint.save, config.checkpoint.load) == ("checkpoints/gpt", "checkpoints/gpt")
    assert (config.checkpoint.save_interval, config.logging.log_interval) == (10_000, 100)
    assert config.parallel.distributed_backend == "nccl"
    parallel = config.parallel
    assert (parallel.recompute_granularity, parallel.recompute_method) == ("full", "uniform")
    assert parallel.recompute_num_layers == 1
    assert capsys.readouterr().err == ""


# Defaults of Megatron-LM v2.5, and of v3.0 and later for later flags. It stores the opposite of each --no-... flag;
# False here means that the flag is not given.
NVIDIA_DEFAULTS = """
    --num-layers None, --hidden-size None, --ffn-hidden-size None, --num-attention-heads None, --kv-channels None,
    --num-distributed-optimizer-instances 1,
    --max-position-embeddings None, --make-vocab-size-divisible-by 128, --layernorm-epsilon 1e-5,
    --openai-gelu False, --log-params-norm False, --log-num-zeros-in-grad False, --tensorboard-log-interval 1,
    --strict-lambada False,
    --log-memory-to-tensorboard False, --log-timers-to-tensorboard False, --timing-log-level 0,
    --timing-log-option minmax, --profile False, --profile-step-start 10, --profile-step-end 12,
    --tensorboard-queue-size 1000, --attention-dropout 0.1, --hidden-dropout 0.1, --weight-decay 0.01,
    --clip-grad 1.0, --adam-beta1 0.9, --adam-beta2 0.999, --adam-eps 1e-8, --sgd-momentum 0.9,
    --micro-batch-size None, --global-batch-size None, --rampup-batch-size None, --train-iters None,
    --train-samples None, --log-interval 100, --exit-interval None, --exit-duration-in-mins None,
    --tensorboard-dir None, --no-bias-gelu-fusion False, --optimizer adam, --seed 1234, --init-method-std 0.02,
    --init-method-xavier-uniform False, --lr None, --lr-decay-style linear, --lr-decay-iters None,
    --lr-decay-samples None, --lr-warmup-fraction None, --lr-warmup-iters 0, --lr-warmup-samples 0, --min-lr 0.0,
    --save None, --save-interval None, --save-retain-interval None, --no-save-optim False, --async-save False,
    --load None, --no-load-optim False, --ckpt-step None, --use-checkpoint-args False,
    --apply-layernorm-1p False, --embed-layernorm False, --apply-residual-connection-post-layernorm False,
    --finetune False, --fp16 False, --bf16 False, --loss-scale None, --initial-loss-scale 4294967296,
    --fp32-residual-connection False, --min-loss-scale 1.0, --loss-scale-window 1000, --hysteresis 2,
    --eval-iters 100, --eval-interval 1000, --data-path None, --vocab-file None,
    --merge-file None, --seq-length None, --encoder-seq-length None, --num-workers 2, --tokenizer-type None,
    --reset-position-ids False, --reset-attention-mask False, --eod-mask-loss False,
    --use-checkpoint-opt_param-scheduler False, --start-weight-decay None, --end-weight-decay None,
    --weight-decay-incr-style constant, --disable-bias-linear False, --normalization LayerNorm,
    --norm-epsilon 1e-5, --position-embedding-type learned_absolute, --rotary-base 10000, --rotary-percent 1.0,
    --swiglu False, --untie-embeddings-and-output-weights False, --group-query-attention False,
    --tokenizer-model None, --vocab-size None, --mock-data False, --data-cache-path None,
    --distributed-timeout-minutes 10, --lr-warmup-init 0.0, --lr-wsd-decay-style exponential,
    --lr-wsd-decay-iters None, --lr-wsd-decay-samples None, --train-data-path None, --valid-data-path None,
    --test-data-path None, --tensor-model-parallel-size 1, --sequence-parallel False,
    --pipeline-model-parallel-size 1, --num-layers-per-virtual-pipeline-stage None,
    --decoder-first-pipeline-num-layers None, --decoder-last-pipeline-num-layers None,
    --pipeline-model-parallel-layout None, --account-for-embedding-in-pipeline-split False,
    --account-for-loss-in-pipeline-split False,
    --no-scatter-gather-tensors-in-pipeline False, --use-distributed-optimizer False,
    --data-parallel-sharding-strategy no_shard, --overlap-grad-reduce False,
    --overlap-param-gather False, --grad-reduce-in-bf16 False, --recompute-activations False,
    --recompute-granularity None, --recompute-method None, --checkpoint-activations False,
    --distribute-saved-activations False, --distribute-checkpointed-activations False, --mask-prob 0.15,
    --short-seq-prob 0.1, --bert-no-binary-head False, --add-qkv-bias False, --qk-layernorm False,
    --use-rope-scaling False, --rope-scaling-factor 8.0, --skip-train False,
    --tiktoken-pattern None, --tiktoken-num-special-tokens 1000,
    --tp-comm-overlap False, --manual-gc False, --manual-gc-interval 0, --no-manual-gc-eval False, --muon-momentum 0.95,
    --muon-nesterov False, --muon-use-nesterov False, --muon-num-ns-steps 5, --muon-scale-mode spectral,
    --muon-extra-scale-factor 1.0, --fp8-format None, --first-last-layers-bf16 False,
    --num-layers-at-start-in-bf16 1, --num-layers-at-end-in-bf16 1,
    --num-experts None, --moe-ffn-hidden-size None, --moe-shared-expert-intermediate-size None,
    --moe-shared-expert-gate False, --moe-shared-expert-overlap False, --moe-router-topk 2,
    --moe-router-score-function softmax,
    --moe-router-pre-softmax False, --moe-router-num-groups None, --moe-router-group-topk None,
    --moe-router-topk-scaling-factor None, --moe-z-loss-coeff None, --moe-router-enable-expert-bias False,
    --moe-router-bias-update-rate 1e-3, --moe-expert-capacity-factor None, --moe-token-drop-policy probs,
    --moe-pad-expert-input-to-capacity False, --moe-grouped-gemm False, --moe-layer-recompute False,
    --context-parallel-size 1, --hierarchical-context-parallel-sizes None,
    --expert-model-parallel-size 1, --expert-tensor-parallel-size None, --moe-per-layer-logging False,
    --multi-latent-attention False, --q-lora-rank None, --kv-lora-rank 32, --qk-head-dim 128, --qk-pos-emb-head-dim 64,
    --v-head-dim 128, --mscale 1.0, --mscale-all-dim 0.0, --mtp-loss-scaling-factor 0.1,
    --window-size None, --window-attn-skip-freq None, --no-rope-freq None,
    --rotary-interleaved False, --softmax-scale None, --softmax-type vanilla,
    --no-yarn-correction-range-round-to-int False
"""
# Defaults that are spelled differently but mean the same, or that differ on purpose.
OTHER_DEFAULTS = {
    "--cp-comm-type": "p2p",  # ['p2p'], one for each layer
    "--split": None,  # '969, 30, 1'; with None, --train-data-path can tell that --split was not given
    "--dataloader-type": "single",  # None, which becomes 'single'
    "--distributed-backend": None,  # 'nccl'; here gloo without a GPU
    "--overlapping-eval": None,  # 32 in its tasks/main.py; the same here in tools/evaluate.py
    "--num-query-groups": None,  # 1; the same here with --group-query-attention
    "--wandb-project": None,  # '', which is equivalent
    "--wandb-exp-name": None,
    "--wandb-entity": None,
    "--ddp-bucket-size": 40_000_000,  # None, which becomes 40 million, or more with many replicas
    "--profile-ranks": (0,),  # [0]
    "--fp8-recipe": "tensorwise",  # delayed, which is not implemented
    "--recompute-num-layers": None,  # 1; the same here with full recomputation
    "--checkpoint-num-layers": None,
    "--moe-layer-freq": "1",  # 1
    "--mtp-num-layers": 0,  # None, which means the same
    "--moe-router-load-balancing-type": ("aux_loss",),  # 'aux_loss'
    "--moe-aux-loss-coeff": (0.0,),  # 0.0
    "--moe-router-dtype": "fp32",  # None, the precision of the model
    "--moe-token-dispatcher-type": "alltoall",  # 'allgather', which sends every token to all ranks
}
# Name of --vocab-file in the README of v2.5, and the hyphenated spelling in later versions of a flag of v3.0.
ALIASES = {
    "--check-weight-hash-across-dp-replicas-interval",
    "--vocab",
    "--use-checkpoint-opt-param-scheduler",
}


def test_defaults_are_nvidias() -> None:
    expected = dict(line.split() for line in NVIDIA_DEFAULTS.replace("\n", " ").split(","))
    seen = set()
    for _, field, kind in all_flags():
        for name in (flag_name(field), *field.metadata["flag"].aliases):
            seen.add(name)
            if kind is bool:
                assert expected.get(name, "False") == "False", name
            elif name in OTHER_DEFAULTS:
                assert field.default == OTHER_DEFAULTS[name], name
            elif name not in OURS_ALONE | ALIASES:
                value = expected[name]
                assert field.default == (None if value == "None" else kind(value)), name
    assert seen == set(expected) | set(OTHER_DEFAULTS) | OURS_ALONE | ALIASES


def test_derived_defaults() -> None:
    config = parse()
    assert config.model.max_position_embeddings == 16
    assert (config.model.ffn_hidden_size, config.model.kv_channels) == (32, 4)
    assert parse("--group-query-attention").model.num_query_groups == 1
    # Two thirds of 4 h in whole multiples of 64, as in Megatron-LM.
    for hidden, ffn in ((8, 64), (128, 320), (4096, 10880)):
        gated = parse("--swiglu", "--hidden-size", str(hidden), "--num-attention-heads", "2")
        assert gated.model.ffn_hidden_size == ffn


def test_a_switch_inverts_its_default() -> None:
    experts = "--num-experts 4 --disable-bias-linear"
    needs = {
        "sequence_parallel": "--tensor-model-parallel-size 2",
        "overlap_param_gather": "--use-distributed-optimizer",
        "distribute_saved_activations": "--tensor-model-parallel-size 2 --recompute-granularity full",
        "cuda_graph": "--attention-dropout 0",
        "tp_comm_overlap": "--tensor-model-parallel-size 2",
        "async_save": "--save folder",
        "enable_optimizer_post_validation": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h2 "
        "--untie-embeddings-and-output-weights",
        "save_best": "--save folder",
        "strict_lambada": "--eval-tasks LAMBADA --eval-tasks-data file",
        "manual_gc_eval": "--manual-gc",
        "multi_latent_attention": "--position-embedding-type rope",
        "yarn_correction_range_round_to_int": "--use-rope-scaling --rope-scaling-type yarn",
        "profile": "--save folder",
        "use_checkpoint_args": "--save new-folder --load new-folder",
        "moe_shared_expert_gate": f"{experts} --moe-shared-expert-intermediate-size 8",
        "moe_shared_expert_overlap": f"{experts} --moe-shared-expert-intermediate-size 8",
        "moe_router_enable_expert_bias": f"{experts} --moe-router-score-function sigmoid",
        "moe_pad_expert_input_to_capacity": f"{experts} --moe-expert-capacity-factor 1",
    }
    needs |= dict.fromkeys(
        (
            "moe_router_pre_softmax",
            "moe_grouped_gemm",
            "moe_layer_recompute",
            "moe_per_layer_logging",
            "add_expert_bias",
        ),
        experts,
    )
    for part, field, kind in all_flags():
        if kind is bool:
            config = parse(f"{flag_name(field)} {needs.get(field.name, '')}")
            section = config.plugins.get(part) or getattr(config, part)
            assert getattr(section, field.name) is not field.default, field.name


def test_aliases_lists_negative_numbers_and_equals_signs() -> None:
    config = parse("--layernorm-epsilon 1e-6 --data-path 0.3 a 0.7 b --lr=2e-3 --encoder-seq-length 4")
    assert config.model.norm_epsilon == 1e-6
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert (config.optimizer.lr, config.data.seq_length) == (2e-3, 4)


def test_entry_points_choose_defaults_that_the_command_line_overrides() -> None:
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    words = BASE.split()
    config = parse_run_config(words, description="a test", defaults=defaults)
    assert config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    words += ["--tokenizer-type", "NullTokenizer"]
    config = parse_run_config(words, description="a test", defaults=defaults)
    assert config.tokenizer.tokenizer_type == "NullTokenizer"


# ---- bad values of single flags


def out_of_range(spec: Flag, kind: type) -> Iterator[str]:
    step = 1 if kind is int else 0.5
    if spec.low is not None:
        yield str(kind(spec.low) - step)
    if spec.above is not None:
        yield str(kind(spec.above))
        yield str(kind(spec.above) - step)
        yield "-1e-4"
    if spec.high is not None:
        yield str(kind(spec.high) + step)


@pytest.mark.parametrize("name", NUMBERS)
def test_bad_numbers(name: str) -> None:
    spec, kind = NUMBERS[name]
    assert spec.low is not None or spec.above is not None, "every number has a lower bound"
    words = ["x", "", "1,5", "nan", "inf", "-inf", "0x10", *out_of_range(spec, kind)]
    for word in words + (["1.5", "1e3"] if kind is int else []):
        message = error_of(name, *[word] * (spec.nargs if isinstance(spec.nargs, int) else 1))
        assert message.startswith(name), message
        assert "\n" not in message
        assert (repr(word) in message) or (str(kind(word)) in message), message


@pytest.mark.parametrize("name", CHOICES)
def test_bad_choices(name: str) -> None:
    spec = CHOICES[name]
    first = next(iter(spec.choices))
    for word in ("nonsense", first + "x", first.swapcase()):
        if word not in spec.choices:
            assert error_of(name, word) == f"{name}: {word!r} is not one of {', '.join(spec.choices)}"


@pytest.mark.parametrize("name", VALUED)
def test_missing_values(name: str) -> None:
    needs = {
        None: "expected one argument",
        "+": "expected at least one argument",
        2: "expected 2 arguments",
        3: "expected 3 arguments",
    }[VALUED[name][0].nargs]
    for following in ([], ["--bf16"], ["--bf16", "--seed", "3"]):
        message = error_of(name, *following)
        assert name in message.split(": ")[0].split("/"), message
        assert message.endswith(needs)
    message = error_of(name, *[""] * (3 if needs.endswith("3 arguments") else 1))
    assert message.startswith(f"{name}: ") or f"{name}/" in message or f"/{name}: " in message, message


def test_a_switch_takes_no_value() -> None:
    assert error_of("--bf16=1") == "--bf16: takes no value, but was given '1'"
    assert error_of("--bf16", "true") == "'true' is not expected here; every value follows its flag"


@pytest.mark.parametrize("word", ["-1", "-1e-4", "-.5", "-inf", "-nan"])
def test_a_negative_number_is_a_value_and_not_a_flag(word: str) -> None:
    assert error_of("--lr", word).startswith("--lr: ")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--num-layer", "--num-layers"),
        ("--hiden-size", "--hidden-size"),
        ("--num_layer", "--num-layers"),
        ("--micro-batch", "--micro-batch-size"),
        ("--universal", None),
        ("-x", None),
    ],
)
def test_an_unknown_flag_suggests_the_nearest(word: str, nearest: str | None) -> None:
    hint = f"did you mean {nearest}?" if nearest else "--help lists the flags"
    assert error_of(word, "3") == f"{word.split('=')[0]} is not a flag of this command; {hint}"


def test_all_unknown_and_refused_flags_are_in_one_error() -> None:
    message = error_of("--hiden-size", "8", "--squared-relu", "--no-such", "a", "b", "--hiden-size=9")
    assert message.splitlines() == [
        "--hiden-size is not a flag of this command; did you mean --hidden-size?",
        "--no-such is not a flag of this command; --help lists the flags",
        "--squared-relu is not supported: not implemented",
    ]


def test_underscores_stand_for_dashes() -> None:
    """Only where the flag does not exist with underscores; values keep theirs."""
    config = parse("--hidden_dropout=0.25 --data_path __load --use_checkpoint_opt_param_scheduler")
    assert config.model.hidden_dropout == 0.25 and config.data.data_path == ("__load",)
    assert config.optimizer.use_checkpoint_opt_param_scheduler


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("--rope", "--position-embedding-type rope"),
        ("--learning-rate=3", "--lr"),
        ("--learning_rate", "--lr"),
        ("--epochs", "--train-epochs"),
        ("--output-dir", "--save"),
        ("--bfloat16", "--bf16"),
        ("--dtype", "--bf16 or --fp16; the default is fp32"),
    ],
)
def test_flags_of_other_tools_suggest_ours(word: str, instead: str) -> None:
    assert error_of(word, "3") == f"{word.split('=')[0]} is not a flag of this command; use {instead}"


def test_suggested_flags_exist() -> None:
    ours = run_parser("", {}).flags
    for name, instead in OTHER_NAMES.items():
        assert set(re.findall(r"--[\w-]+", instead)) <= set(ours), name
        assert name not in ours, "the parser knows it already"


# ---- conflicting and missing flags

CROSS = [
    ("--train-samples 100", "--train-samples: 100 does not go with --train-iters "),
    ("--max-position-embeddings 8", "--seq-length: 16 is longer than --max-position-embeddings 8"),
    ("--num-attention-heads 3", "--num-attention-heads: 3 does not divide --hidden-size 8"),
    (
        "--group-query-attention --num-query-groups 3",
        "--num-query-groups: 3 does not divide --num-attention-heads 2",
    ),
    ("--num-query-groups 1", "--num-query-groups: 1 needs --group-query-attention"),
    ("--rope-scaling-type yarn", "--rope-scaling-type: yarn needs --use-rope-scaling"),
    ("--rope-scaling-original-length 4096", "--rope-scaling-original-length: 4096 needs --use-rope-scaling"),
    ("--position-embedding-type rope --rotary-percent 0.1", "--rotary-percent: 0.1 of 4 channels per head"),
    ("--min-lr 1", "--min-lr: 1.0 is above --lr 0.001"),
    ("--lr-warmup-init 1", "--lr-warmup-init: 1.0 is above --lr 0.001"),
    (
        "--lr-warmup-fraction .1 --lr-warmup-iters 1",
        "--lr-warmup-fraction: 0.1 was given with --lr-warmup-iters or",
    ),
    ("--lr-decay-samples 5", "--lr-decay-samples: 5 does not go with --train-iters; use --lr-decay-iters"),
    ("--lr-warmup-samples 5", "--lr-warmup-samples: 5 does not go with --train-iters; use --lr-warmup-iters"),
    (
        "--lr-wsd-decay-samples 5",
        "--lr-wsd-decay-samples: 5 does not go with --train-iters; use --lr-wsd-decay-iters",
    ),
    ("--rampup-batch-size 1 1 5", "--rampup-batch-size needs --train-samples in place of --train-iters"),
    (
        "--start-weight-decay 0.1",
        "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style",
    ),
    ("--weight-decay-incr-style linear", "--weight-decay-incr-style: linear needs both"),
    ("--fp16 --bf16", "--fp16 and --bf16 exclude each other; leave one of them out"),
    (
        "--fp16 --initial-loss-scale 8 --min-loss-scale 16",
        "--initial-loss-scale: 8 is below --min-loss-scale 16",
    ),
    (
        "--fp16 --loss-scale 128 --hysteresis 3",
        "--hysteresis: 3 is for a dynamic scale, but --loss-scale 128 fixes it; give only one",
    ),
    (
        "--bf16-optimizer-states --optimizer sgd",
        "--bf16-optimizer-states needs --optimizer adam, not sgd",
    ),
    (
        "--data-parallel-sharding-strategy optim_grads --pipeline-schedule zb-h1",
        "--data-parallel-sharding-strategy: optim_grads reduces gradients of a layer when its backward ends,",
    ),
    (
        "--num-distributed-optimizer-instances 2",
        "--num-distributed-optimizer-instances needs --use-distributed-optimizer",
    ),
    ("--mock-data --data-path a", "--data-path and --mock-data exclude each other"),
    ("--train-data-path a --data-path a", "--train-data-path and --data-path exclude each other"),
    ("--valid-data-path a --split 9,1", "--valid-data-path and --split exclude each other"),
    ("--split 1,2,3,4", "--split: '1,2,3,4' does not divide the data"),
    ("--split -1,2", "--split: '-1,2' does not divide the data"),
    ("--split one", "--split: 'one' is not a list of numbers"),
    ("--wandb-exp-name a", "--wandb-exp-name needs --wandb-project"),
    ("--wandb-entity a", "--wandb-entity needs --wandb-project"),
    ("--wandb-group a", "--wandb-group needs --wandb-project"),
    ("--mlflow-tracking-uri a", "--mlflow-tracking-uri needs --mlflow-experiment"),
    ("--save-interval 5", "--save-interval: 5 needs --save, the folder"),
    ("--keep-last 2 --load a", "--keep-last: 2 needs --save, the folder"),
    (
        "--recompute-activations --checkpoint-activations",
        "--recompute-activations and --checkpoint-activations exclude each other; leave one of them out",
    ),
    (
        "--recompute-activations --recompute-granularity full",
        "--recompute-activations means --recompute-granularity selective; leave one of them out",
    ),
    (
        "--recompute-granularity selective --checkpoint-activations",
        "--checkpoint-activations means --recompute-granularity full; leave one of them out",
    ),
    ("--attention-dropout 1", "--attention-dropout: 1.0 is too large; it must be less than 1"),
    ("--hidden-dropout 1", "--hidden-dropout: 1.0 is too large; it must be less than 1"),
    ("--optimizer sgd --sgd-momentum 5", "--sgd-momentum: 5.0 is too large; it must be less than 1"),
]


@pytest.mark.parametrize(("flags", "message"), CROSS, ids=[flags for flags, _ in CROSS])
def test_conflicting_flags(flags: str, message: str) -> None:
    assert error_of(*flags.split()).startswith(message)


def test_flags_are_utf8() -> None:
    """Python passes other bytes of the command line as surrogates."""
    assert error_of("--save", "a\udcff").startswith(r"--save: 'a\udcff' is not UTF-8 text")


@pytest.mark.parametrize("name", BASE.split()[::2])
def test_required_flags(name: str) -> None:
    words = BASE.split()
    at = words.index(name)
    message = (
        "--train-iters, --train-samples, --train-tokens or --train-epochs"
        if name == "--train-iters"
        else name
    )
    message += " is required: "
    with pytest.raises(InputError) as error:
        parse(base=" ".join(words[:at] + words[at + 2 :]))
    assert str(error.value).startswith(message)


def test_flags_without_effect_in_this_precision_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    scaling = "--loss-scale 8192 --min-loss-scale 2"
    with pytest.raises(InputError, match=r"--min-loss-scale: 2 is for a dynamic scale"):
        parse("--fp16", scaling)
    parse("--bf16 --loss-scale 8192")
    assert capsys.readouterr().err == "note: --loss-scale has no effect: only --fp16 uses loss scaling\n"
    parse("--fp32-residual-connection")
    assert capsys.readouterr().err == (
        "note: --fp32-residual-connection has no effect: the run is in fp32 (no --bf16 or --fp16)\n"
    )
    assert parse("--bf16 --fp32-residual-connection").model.fp32_residual_connection
    assert parse("--fp16 --loss-scale 8192").plugin(LossScaleConfig).loss_scale == 8192
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "unused", "reason"),
    [
        ("--sgd-momentum 0.5", "--sgd-momentum", "with --optimizer adam"),
        ("--optimizer sgd --sgd-momentum 0.5 --adam-beta1 0.8", "--adam-beta1", "with --optimizer sgd"),
        ("--optimizer muon --adam-beta1 0.8 --muon-momentum 0.9", "", ""),
        ("--optimizer muon --lion-beta1 0.8", "--lion-beta1", "with --optimizer muon"),
        ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-iters", "without --lr-decay-style WSD"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style cosine", "", ""),
    ],
)
def test_flags_of_another_optimizer_or_schedule_are_noted(
    flags: str, unused: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(flags)
    assert capsys.readouterr().err == (f"note: {unused} has no effect {reason}\n" if unused else "")


def test_help_and_reference_mark_required_flags() -> None:
    required = {flag_name(field) for _, field, _ in all_flags() if field.metadata["flag"].required}
    assert required == set(BASE.split()[::2]) - {"--seq-length", "--train-iters"}
    text = " ".join(run_parser("", {}).format_help().split())
    assert text.count("(required)") == len(required)
    page = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    for name in required:
        assert re.search(rf"{name} [NX] [^-]*\(required\)", text), name
        assert re.search(rf"\| `{name}` \| [^|]* \| \(required\) \|", page), name


def test_runs_in_samples_reject_lengths_in_iterations() -> None:
    base = BASE.replace("--train-iters 10", "--train-samples 100")
    config = parse("--lr-warmup-samples 5 --lr-decay-samples 90 --rampup-batch-size 1 1 5", base=base)
    assert config.plugin(RampUpConfig).rampup_batch_size == (1, 1, 5)
    with pytest.raises(
        InputError, match=r"^--lr-decay-iters: 5 does not go with --train-samples; use --lr-decay-sam"
    ):
        parse("--lr-decay-iters 5", base=base)


# ---- config files


def file_of(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        """
        # names with dashes or underscores
        num-layers: 3
        hidden_size: 12
        lr: 2e-4
        min-lr: 1.0e-5
        data-path: [0.3, a, 0.7, b]
        bf16: true
        swiglu: false
        disable-bias-linear: true
        use_checkpoint_opt_param_scheduler: true
        layernorm-epsilon: 1.0e-6
        split: 9,1
        save: null
        rampup_batch_size:
        """,
    )
    words = "--seq-length 16 --num-attention-heads 2 --micro-batch-size 1 --train-iters 10".split()
    config = parse_run_config(
        [*words, "--config", path, "--hidden-size", "16"], description="a test", defaults={"num_layers": 9}
    )
    assert (config.model.num_layers, config.model.hidden_size) == (3, 16)
    assert (config.optimizer.lr, config.optimizer.min_lr) == (2e-4, 1e-5)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert (config.training.bf16, config.model.swiglu, config.model.add_bias_linear) == (True, False, False)
    assert config.optimizer.use_checkpoint_opt_param_scheduler
    assert (config.model.norm_epsilon, config.data.split) == (1e-6, "9,1")
    assert (config.checkpoint.save, config.plugin(RampUpConfig).rampup_batch_size) == (None, None)


def test_the_length_of_a_list_in_a_file_is_checked(tmp_path: Path) -> None:
    base = BASE.replace("--train-iters", "--train-samples")
    path = file_of(tmp_path, "rampup-batch-size: [2, 2, 100]\n")
    assert parse(f"--config {path}", base=base).plugin(RampUpConfig).rampup_batch_size == (2, 2, 100)
    path = file_of(tmp_path, "rampup-batch-size: 2\n")
    assert error_of("--config", path) == f"--config {path}: --rampup-batch-size: expected 3 arguments"


def test_a_list_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, "data-path: [a, b]\n")
    assert parse(f"--config={path} --data-path c").data.data_path == ("c",)
    assert parse(f"--config={file_of(tmp_path, 'data-path: a')}").data.data_path == ("a",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-layer: 3", "--num-layer is not a flag of this command; did you mean --num-layers?"),
        ("num-layer: false", "--num-layer is not a flag of this command; did you mean --num-layers?"),
        ("progress: false", "--progress is not a flag of this command; did you mean --no-progress?"),
        ("num-layers: three", "--num-layers: 'three' is not an integer"),
        ("num-layers: 2.0", "--num-layers: '2.0' is not an integer"),
        ("num-layers: true", "--num-layers: True is not a single value"),
        ("num-layers: false", "--num-layers: False is not a single value"),
        ("num-layers: [1, 2]", "--num-layers: [1, 2] is not a single value"),
        ("num-layers: {a: 1}", "--num-layers: a mapping is not a single value"),
        ("lr: fast", "--lr: 'fast' is not a number"),
        ("bf16: 1", "--bf16: 1 is not true or false"),
        ("bf16: 'true'", "--bf16: 'true' is not true or false"),
        ("data-path: []", "--data-path: expected at least one argument"),
        ("data-path: [a, [b]]", "--data-path: ['a', ['b']] is not a list of values"),
        ("data-path: true", "--data-path: True is not a list of values"),
        ("merge-file: ''", "--merge-file: is empty; give a value, or leave the flag out"),
        ("config: other.yaml", "config: belongs on the command line"),
        ("help: true", "help: belongs on the command line"),
        ("squared-relu: true", "--squared-relu is not supported: not implemented"),
        ("lr: 1\nlr = 2", "line 2: is not YAML"),
        ("a: [1, 2", "line 1: is not YAML"),
        (
            "x: !!python/object:os.system {}",
            "line 1: tags are not supported; leave tag:yaml.org,2002:python/object:os.syste out",
        ),
        (
            "x: !!timestamp 2001-01-01",
            "line 1: tags are not supported; leave tag:yaml.org,2002:timestamp out",
        ),
        ("lr: &a 1\nmin-lr: *a", "line 1: anchors and aliases are not supported; write the value out"),
        ("min-lr: *a", "line 1: anchors and aliases are not supported; write the value out"),
        ("<<: {lr: 1}", "line 1: merge keys are not supported; write the values out"),
        ("lr: 1\nlr: 2", "line 2: lr is given twice"),
        (
            "num_layers: 8\nnum-layers: 6",
            "num_layers and num-layers are the same flag; leave one of them out",
        ),
        ("vocab: a\nvocab-file: a", "vocab and vocab-file are the same flag; leave one of them out"),
        ("lr: 1:30", "--lr: '1:30' is not a number"),
        ("? [a, b]\n: 1", "line 1: a name must be text"),
        ("", "must hold 'name: value' lines"),
        ("- num-layers", "must hold 'name: value' lines"),
        ("just text", "must hold 'name: value' lines"),
        ("\x00", "is not YAML"),
        ("seed: " + "9" * 5000, f"--seed: '{'9' * 60}... is not an integer"),
        ("seed: [" + "1, " * 1000 + "1]", "--seed: [" + "1, " * 20 + "... is not a single value"),
        ("# " + "x" * 2**20, "is larger than 1048576 bytes; settings take a few hundred"),
        ("[" * 1000, "line 1: is nested more than 8 deep"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    path = file_of(tmp_path, text)
    assert error_of("--config", path) == f"--config {path}: {message}"


def test_the_range_of_values_in_a_file_is_checked(tmp_path: Path) -> None:
    path = file_of(tmp_path, "lr: -1e-4\nclip-grad: .nan\nseed: -1\n")
    assert error_of("--config", path, "--lr", "1", "--seed", "1") == "--clip-grad: nan is not a finite number"


def test_unreadable_config_files(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert error_of("--config", missing) == f"--config {missing}: cannot be read (No such file or directory)"
    assert error_of("--config", str(tmp_path)) == f"--config {tmp_path}: cannot be read (Is a directory)"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"lr: \xff\xfe")
    assert error_of("--config", str(binary)) == f"--config {binary}: is not YAML"
    assert error_of("--config") == "--config: expected one argument"


# ---- help, exit codes, imports


def test_help_is_grouped_and_complete() -> None:
    text = run_parser("Train a thing.", {"tokenizer_type": "NullTokenizer"}).format_help()
    lines = text.splitlines()
    assert lines[0].endswith(" [flags]") and lines[1] == ""
    titles = [
        "training",
        "data",
        "tokenizer",
        "model",
        "ops",
        "optimizer",
        "parallel",
        "checkpoint",
        "logging",
        "settings",
        "shorthands",
        "tokenizer folder",
        "length",
        "loss scale",
        "spikes",
        "ramp-up",
        "exit",
        "freezing",
        "old checkpoints",
        "best checkpoint",
        "performance",
        "activations",
        "pipeline schedule",
        "low precision",
        "reports",
        "timing",
        "profile",
        "faults",
        "evaluation",
        "samples",
        "dry run",
        "loss",
        "capture",
    ]
    assert [line[:-1] for line in lines if re.fullmatch("[a-z -]+:", line)] == ["options", *titles]
    for part, config in RunConfig.section_types().items():
        assert lines[lines.index(f"{part.replace('_', ' ')}:") + 1] == f"  {summary(config)}"
        assert summary(config).endswith(".")
    words = set(text.replace(",", " ").split())
    for _, field, _ in all_flags():
        assert {flag_name(field), *field.metadata["flag"].aliases} <= words
    assert "--squared-relu" not in words
    assert "Train a thing." in lines
    assert "(default: NullTokenizer)" in " ".join(text.split())
    assert "--rampup-batch-size START INCREMENT SAMPLES\n" in text
    assert "--optimizer {adam,sgd,lion,muon}" in text and "--device {auto,cpu,cuda}" in text


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (InputError("--lr: is odd"), 2, "error: --lr: is odd\n"),
        (TrainingFault("useless"), 1, "error: useless\n"),
        (TransientFault("rank 3 is gone"), 200, "error: rank 3 is gone\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (None, 0, ""),
    ],
)
def test_exit_codes(
    raised: BaseException | None, code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        if raised is not None:
            raise raised
        return 0

    with pytest.raises(SystemExit) as exit:
        run_command(main)
    assert exit.value.code == code
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("rank", "under_torchrun", "printed"),
    [(None, False, True), ("0", True, True), ("3", True, False), ("3", False, True)],
)
def test_an_error_on_every_rank_is_printed_once(
    rank: str | None,
    under_torchrun: bool,
    printed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main() -> int:
        raise TrainingFault("useless")

    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as exit:
        run_command(main)
    assert exit.value.code == 1
    assert capsys.readouterr().err == ("error: useless\n" if printed else "")
    assert (tmp_path / "error.json").exists() == under_torchrun


@pytest.mark.parametrize(("failing", "printed"), [("01", 1), ("1", 0)])
def test_the_summary_of_torchrun_shows_the_error(failing: str, printed: int, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from megatron.cli import run_command
from megatron.errors import InputError

def main():
    if os.environ["RANK"] in {failing!r}:
        raise InputError("--data-path: is nowhere")
    time.sleep(60)

run_command(main)
"""
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    # torchrun ends the other processes when the first has failed, possibly before rank 0 prints.
    assert lines.count("error: --data-path: is nowhere") <= printed
    assert lines[-2].strip() == "traceback : error: --data-path: is nowhere"


def test_ranks_skip_the_shutdown_of_the_interpreter() -> None:
    """It may abort while threads of gloo or NCCL run. What was printed is not lost."""
    program = """
import atexit, sys
from megatron.cli import run_command
atexit.register(print, "shutdown")
run_command(lambda: sys.stderr.write("no newline") and print("done") or 3)
"""
    for size, printed in ((1, "done\nshutdown\n"), (2, "done\n")):
        environment = os.environ | {"WORLD_SIZE": str(size)}
        environment.pop("PYTHONUNBUFFERED", None)
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (result.returncode, result.stdout, result.stderr) == (3, printed, "no newline")


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_tools_reject_unknown_flags() -> None:
    parser = Parser()
    parser.add_argument("--input")
    with pytest.raises(InputError, match=r"^--inptu is not a flag of this command; did you mean --input\?$"):
        parser.parse_args(["--inptu", "a"])
    with pytest.raises(InputError, match=r"^'a' is not expected here; every value follows its flag$"):
        parser.parse_args(["a"])


@pytest.mark.parametrize(
    ("tool", "usage"),
    [
        ("document_flags", "[flags]"),
        ("draw_figures", "FOLDER [flags]"),
        ("generate_text", "[flags]"),
        ("inspect_data", "PREFIX [flags]"),
        ("make_corpus", "[flags]"),
        ("preprocess_data", "[flags]"),
        ("train_tokenizer", "[flags]"),
    ],
)
def test_help_of_tools_is_a_usage_line_and_the_docstring(
    tool: str, usage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", "--help"])
    in_package = (ROOT / "megatron" / "commands" / f"{tool}.py").exists()
    module = importlib.import_module(f"megatron.commands.{tool}" if in_package else tool)
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    assert capsys.readouterr().out.startswith(f"usage: {tool}.py {usage}\n\n{module.__doc__.strip()}\n\n")


def test_parsing_does_not_import_torch() -> None:
    probe = (
        "import sys; from megatron.arguments import parse_run_config as parse; "
        f"parse({BASE.split()!r}, description='', defaults={{}}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr x", "error: --lr: 'x' is not a number"),
        ("--tensor-model-parallel-size 8", "error: --tensor-model-parallel-size 8 x "),
        ("--muon-tp-mode blockwise", "error: --muon-tp-mode blockwise is not supported: "),
        ("--config none.yaml", "error: --config none.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_pretrain_gpt_reports_errors_in_one_line(flags: str, expected: str) -> None:
    done = pretrain_gpt(*BASE.split(), *flags.split())
    assert done.returncode == 2
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_help_of_pretrain_gpt() -> None:
    done = pretrain_gpt("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Pretrain GPT." in done.stdout and "--micro-batch-size N" in done.stdout


def pretrain_gpt(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pretrain_gpt.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_paths_on_an_ascii_terminal() -> None:
    """A path that the terminal cannot show is escaped, and is no reason to end."""
    program = "from megatron.cli import run_command; run_command(lambda: print('saved to \\xe9'))"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "saved to \\xe9\n", "")
