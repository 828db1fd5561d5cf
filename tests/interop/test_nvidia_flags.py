"""Every Megatron-LM flag is supported, noted as having no effect, or refused."""

from __future__ import annotations

import re

import pytest

from megatron.arguments import parse_run_config, run_parser
from megatron.errors import InputError
from megatron.interop.nvidia.flag_table import NvidiaFlag
from megatron.interop.nvidia.flags import NVIDIA_FLAGS
from megatron.training.config import RunConfig

# The required flags of a run.
BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-3"
)


def parse(flags: str = "") -> RunConfig:
    return parse_run_config(f"{BASE} {flags}".split(), description="a test", defaults={})


def error_of(flags: str) -> str:
    with pytest.raises(InputError) as error:
        parse(flags)
    return str(error.value)


V2_5 = """
    num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels max-position-embeddings
    make-vocab-size-divisible-by layernorm-epsilon apply-residual-connection-post-layernorm openai-gelu onnx-safe
    bert-no-binary-head log-params-norm log-num-zeros-in-grad tensorboard-log-interval tensorboard-queue-size
    log-timers-to-tensorboard log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard
    no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard attention-dropout
    hidden-dropout weight-decay clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum micro-batch-size batch-size
    global-batch-size rampup-batch-size checkpoint-activations distribute-checkpointed-activations
    checkpoint-num-layers train-iters train-samples log-interval exit-interval exit-duration-in-mins tensorboard-dir
    no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion optimizer dataloader-type seed
    init-method-std init-method-xavier-uniform lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-fraction
    lr-warmup-iters lr-warmup-samples warmup min-lr override-lr-scheduler use-checkpoint-lr-scheduler save
    save-interval no-save-optim no-save-rng load no-load-optim no-load-rng finetune fp16 bf16 loss-scale
    initial-loss-scale min-loss-scale loss-scale-window hysteresis fp32-residual-connection
    no-query-key-layer-scaling attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 fp16-lm-cross-entropy
    tensor-model-parallel-size pipeline-model-parallel-size model-parallel-size
    num-layers-per-virtual-pipeline-stage distributed-backend DDP-impl use-contiguous-buffers-in-ddp
    no-scatter-gather-tensors-in-pipeline local_rank lazy-mpu-init use-cpu-initialization eval-iters eval-interval
    data-path split vocab-file merge-file vocab-extra-ids seq-length encoder-seq-length decoder-seq-length
    retriever-seq-length sample-rate mask-prob short-seq-prob mmap-warmup num-workers tokenizer-type data-impl
    reset-position-ids reset-attention-mask eod-mask-loss adlr-autoresume adlr-autoresume-interval ict-head-size
    biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load titles-data-path
    query-in-block-prob use-one-sent-docs evidence-data-path retriever-report-topk-accuracies
    retriever-score-scaling block-data-path embedding-path indexer-batch-size indexer-log-interval num-classes
    img-dim num-channels patch-dim
"""
V3_0 = """
    sequence-parallel recompute-activations recompute-granularity recompute-method recompute-num-layers
    distribute-saved-activations use-distributed-optimizer use-checkpoint-args override-opt_param-scheduler
    use-checkpoint-opt_param-scheduler start-weight-decay end-weight-decay weight-decay-incr-style
    exit-signal-handler no-gradient-accumulation-fusion no-async-tensor-model-parallel-allreduce
    no-persist-layer-norm num-experts standalone-embedding-stage pipeline-model-parallel-split-rank timing-log-level
    timing-log-option no-barrier-with-level-1-timing data-parallel-random-init empty-unused-memory-level
    no-data-sharding inference-batch-times-seqlen-threshold use-ring-exchange-p2p log-world-size-to-tensorboard
    no-contiguous-buffers-in-local-ddp no-initialization img-h img-w classes-fraction data-per-class-fraction
    head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type mask-type
    mask-factor iter-per-epoch dino-local-img-size dino-local-crops-number dino-head-hidden-size
    dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp
    dino-warmup-teacher-temp-epochs
"""
EXAMPLES_2026 = """
    attention-backend step-batch-size-schedule use-mcore-models transformer-impl disable-bias-linear normalization
    apply-layernorm-1p position-embedding-type no-position-embedding rotary-base rotary-percent swiglu squared-relu
    untie-embeddings-and-output-weights group-query-attention num-query-groups context-parallel-size
    expert-model-parallel-size overlap-grad-reduce overlap-param-gather grad-reduce-in-bf16 moe-router-topk
    moe-router-load-balancing-type moe-aux-loss-coeff moe-grouped-gemm moe-token-dispatcher-type moe-permute-fusion
    tokenizer-model tiktoken-pattern vocab-size mock-data data-cache-path no-create-attention-mask-in-dataloader
    no-mmap-bin-files decoupled-lr decoupled-min-lr cross-entropy-loss-fusion calculate-per-token-loss manual-gc
    manual-gc-interval fp8-format fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather log-throughput profile
    profile-step-start profile-step-end profile-ranks ckpt-format distributed-timeout-minutes wandb-project
    wandb-exp-name encoder-num-layers decoder-num-layers hybrid-layer-pattern spec use-megatron-fsdp
    data-parallel-sharding-strategy init-model-with-meta-device fsdp-double-buffer use-nccl-ub
    no-check-for-nan-in-loss-and-grad multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim v-head-dim
    qk-layernorm moe-layer-freq moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-num-groups
    moe-router-group-topk moe-router-topk-scaling-factor moe-router-score-function moe-router-enable-expert-bias
    moe-router-bias-update-rate moe-router-dtype moe-router-pre-softmax mtp-num-layers mtp-loss-scaling-factor
    recompute-modules lr-warmup-init auto-detect-ckpt-format dist-ckpt-strictness inference-max-seq-length
    te-rng-tracker cuda-graph-impl inference-dynamic-batching enable-chunked-prefill return-log-probs
"""

# Further flags in the functional tests of August 2026 that this program can run.
FUNCTIONAL_TESTS_2026 = """
    apply-query-key-layer-scaling async-ckpt-use-cpu-shm async-save async-strategy
    check-weight-hash-across-dp-replicas-interval ckpt-assume-constant-structure ckpt-fully-parallel-load
    ckpt-fully-parallel-save ddp-average-in-collective decoder-first-pipeline-num-layers
    decoder-last-pipeline-num-layers defer-embedding-wgrad-compute deterministic-mode
    disable-gloo-process-groups dist-ckpt-optim-fully-reshardable no-ckpt-fully-parallel-save
    num-distributed-optimizer-instances overlap-param-gather-with-optimizer-step rerun-mode test-mode
    use-persistent-ckpt-worker use-torch-fsdp2 verify-integrity wgrad-deferral-limit
"""


@pytest.mark.parametrize(
    ("names", "count"), [(V2_5, 135), (V3_0, 52), (EXAMPLES_2026, 92), (FUNCTIONAL_TESTS_2026, 24)]
)
def test_every_nvidia_flag_is_known(names: str, count: int) -> None:
    assert len(set(names.split())) == count
    known = run_parser("", {}).flags
    assert [name for name in names.split() if f"--{name}" not in known] == []


def test_flags_of_functional_tests_are_taken() -> None:
    refused = {flag.name[2:] for flag in NVIDIA_FLAGS if flag.refused and not flag.harmless}
    assert refused.isdisjoint(FUNCTIONAL_TESTS_2026.split())


def test_notes_are_short_lines() -> None:
    ours = run_parser("", {}).flags.keys() - {flag.name for flag in NVIDIA_FLAGS}
    for flag in NVIDIA_FLAGS:
        assert flag.note and len(flag.note) <= 80, flag.name
        assert "\n" not in flag.note and not flag.note.endswith(".")
        # A flag that a note recommends must exist under its full name.
        assert set(re.findall(r"--[\w-]+", flag.note)) <= set(ours), flag.name
        assert not flag.harmless or flag.refused, flag.name


@pytest.fixture(scope="module")
def base_config():
    """Configuration of a run without any of these flags."""
    return parse()


@pytest.mark.parametrize("flag", NVIDIA_FLAGS, ids=lambda flag: flag.name)
def test_flag_is_noted_once_or_refused(
    flag: NvidiaFlag, base_config, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"{flag.name} 8" if flag.nargs else flag.name
    if flag.instead:
        return
    if flag.refused:
        assert error_of(given) == f"{given} is not supported: {flag.note}"
    else:
        assert parse(f"{given} {given}") == base_config
        assert capsys.readouterr().err == f"note: {given} has no effect: {flag.note}\n"


@pytest.mark.parametrize("flag", [flag for flag in NVIDIA_FLAGS if flag.harmless], ids=lambda flag: flag.name)
def test_harmless_values(flag: NvidiaFlag, base_config, capsys: pytest.CaptureFixture[str]) -> None:
    for value in flag.harmless:
        assert parse(f"{flag.name} {value}") == base_config
        assert parse(f"{flag.name}={value}") == base_config
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("--batch-size 8", "--micro-batch-size 8"),
        ("--warmup .01", "--lr-warmup-fraction .01"),
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        (
            "--activations-checkpoint-method uniform",
            "--recompute-granularity full --recompute-method uniform",
        ),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        ),
        ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt_param-scheduler"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--use_rms_norm", "--normalization RMSNorm"),
        ("--no_tie_embed_logits", "--untie-embeddings-and-output-weights"),
        ("--num_attention_heads_kv 1", "--group-query-attention --num-query-groups 1"),
        ("--rope_theta 500000", "--rotary-base 500000"),
    ],
)
def test_other_names_are_translated(given: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(given) == parse(instead) != parse()
    notes = capsys.readouterr().err.splitlines()
    words = [f"--{part.strip()}" for part in given.split("--")[1:]]
    assert [note.split(" is read as ")[0] for note in notes] == [f"note: {word}" for word in words]
    assert " ".join(note.split(" is read as ")[1] for note in notes) == instead


def test_a_value_of_another_name_is_checked() -> None:
    assert error_of("--batch-size x") == "--micro-batch-size: 'x' is not an integer"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--glu-activation swiglu", "use --swiglu or --activation-function geglu"),
        ("--universal-checkpoint", "DeepSpeed's checkpoints are not read"),
        ("--step-batch-size-schedule 0:384 200B:768", "use --rampup-batch-size START INCREMENT SAMPLES"),
    ],
)
def test_hints(given: str, hint: str) -> None:
    """These once suggested a flag with a similar name and another meaning."""
    assert error_of(given).startswith(f"{given} is not supported: {hint}")


def test_a_deepspeed_script_is_told_everything_at_once() -> None:
    message = error_of(
        "--deepspeed --deepspeed_config ds.json --zero-stage 1 --embed-layernorm --tokenizer-name-or-path t --alibi"
    )
    names = [line.split()[0] for line in message.splitlines()]
    assert names == ["--alibi", "--deepspeed_config", "--tokenizer-name-or-path"]


def test_flags_of_nvidia_test_configurations(base_config) -> None:
    flags = (
        "--deterministic-mode --use-persistent-ckpt-worker --dist-ckpt-optim-fully-reshardable --log-progress"
    )
    assert parse(f"{flags} --use-tp-pp-dp-mapping") == base_config


def test_values_of_flags() -> None:
    assert error_of("--fp8-margin") == "--fp8-margin: expected 1 argument"
    assert error_of("--squared-relu=1") == "--squared-relu: takes no value, but was given '1'"
    assert error_of("--retriever-report-topk-accuracies 1 2").startswith(
        "--retriever-report-topk-accuracies 1 2 is not supported: "
    )
    assert parse("--recompute-modules core_attn mlp --lr 2").optimizer.lr == 2


def test_only_rank_0_prints_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    parse("--DDP-impl local")
    assert capsys.readouterr().err == ""
