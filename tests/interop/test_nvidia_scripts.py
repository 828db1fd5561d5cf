"""Command lines of Megatron-LM's example scripts for GPT and BERT, of v2.5 and of August 2026.

Each is the list of flags that a script passes, with its values, placeholders for paths, and its number of processes.
Flags that are not refused by name must set the given values, and the layout must fit the number of processes.
"""

from __future__ import annotations

import dataclasses
import re
import typing

import pytest

from megatron.arguments import parse_run_config, run_parser
from megatron.errors import InputError
from megatron.flags import flag_name, value_type
from megatron.training.config import RunConfig
from megatron.training.layout import check_layout

PATHS = "--save ckpt --load ckpt --data-path my_text_document"
REPORTS = "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10"
BPE = "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"


@dataclasses.dataclass(frozen=True)
class Script:
    """A command line.

    Attributes:
        flags: flags of the script.
        processes: number of processes that it starts.
        refused: flags that are refused here.
        missing: required flags that the script lacks; Megatron-LM requires them too.
        layout_error: message about its layout, which Megatron-LM does not support either.
    """

    flags: str
    processes: int = 1
    refused: str = ""
    missing: str = ""
    layout_error: str = ""


# ---- v2.5

BERT_345M = f"""
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 512 {PATHS} {REPORTS}
    --vocab-file bert-vocab.txt --data-impl mmap --split 949,50,1 --lr 0.0001 --lr-decay-style linear
    --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --lr-decay-iters 990000 --fp16
"""
GPT_345M = f"""
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --train-iters 500000 --lr-decay-iters 320000 {PATHS} {REPORTS} {BPE} --data-impl mmap --split 949,50,1
    --distributed-backend nccl --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2
    --clip-grad 1.0 --lr-warmup-fraction .01 --checkpoint-activations --fp16
"""
GPT_175B = f"""
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288
    --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
    --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375
    --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --log-interval 10 --eval-iters 40 --eval-interval 1000 --data-path 0.2 first 0.3 second 0.5 third {BPE}
    --save-interval 1000 --save ckpt --load ckpt --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --tensorboard-dir logs --fp16
    --checkpoint-activations
"""
README_BERT = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
    --lr 0.0001 --lr-decay-iters 990000 --train-iters 2000000 --min-lr 0.00001 --lr-warmup-fraction 0.01
    --micro-batch-size 4 --global-batch-size 8 --vocab-file bert-vocab.txt --split 949,50,1 --fp16
    --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 --checkpoint-activations
    --save ckpt --load ckpt --data-path my-bert_text_sentence
"""
README_GPT = f"""
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine {BPE} --lr-warmup-fraction .01 --fp16
    --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 --checkpoint-activations
    --save ckpt --load ckpt --data-path my-gpt2_text_document
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --DDP-impl torch
"""

SCRIPTS = {
    "pretrain_bert": Script(
        f"{BERT_345M} --micro-batch-size 4 --global-batch-size 8 --seq-length 512 --train-iters 2000000 "
        "--min-lr 0.00001"
    ),
    "pretrain_bert_distributed": Script(
        f"{BERT_345M} --micro-batch-size 4 --global-batch-size 32 --seq-length 512 --train-iters 1000000 "
        "--distributed-backend nccl --min-lr 1.0e-5 --local_rank 3",
        processes=8,
    ),
    "pretrain_bert_distributed_with_mp": Script(
        f"{BERT_345M} --micro-batch-size 2 --global-batch-size 16 --train-iters 1000000 --distributed-backend nccl "
        "--min-lr 1.0e-5 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --local_rank=3",
        processes=8,
        missing="--seq-length 512",
    ),
    "pretrain_gpt": Script(f"{GPT_345M} --micro-batch-size 4 --global-batch-size 8"),
    "pretrain_gpt_distributed": Script(
        f"{GPT_345M} --micro-batch-size 8 --global-batch-size 64 --local_rank 0", processes=8
    ),
    "pretrain_gpt_distributed_with_mp": Script(
        f"{GPT_345M} --micro-batch-size 4 --global-batch-size 16 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
        processes=8,
    ),
    "pretrain_gpt3_175B": Script(GPT_175B, processes=1024),
    "README BERT": Script(README_BERT),
    "README GPT": Script(README_GPT, processes=4),
}

# ---- v2.5, arXiv 2104.04473: one configuration for each figure

SC21_FLAGS = f"""
    --data-path my_text_document {BPE} --log-interval 5 --seq-length 2048 --max-position-embeddings 2048
    --train-iters 500 --lr-decay-iters 320 --lr 0.0001 --min-lr 0.00001 --lr-decay-style cosine
    --lr-warmup-fraction 0.01 --split 969,30,1 --eval-iters 100 --eval-interval 1000 --clip-grad 1.0 --fp16
    --loss-scale 8192 --checkpoint-activations
"""
# Processes; tensor- and pipeline-parallel size; micro- and global batch size; layers, width, heads; layers per chunk.
SC21_RUNS = {
    "figure 11": (8, 8, 1, 1, 8, 3, 20480, 128, None),
    "figure 12": (96, 8, 12, 1, 12, 96, 12288, 96, 2),
    "figure 13": (64, 32, 2, 1, 32, 32, 20480, 128, None),
    "figure 14": (64, 1, 2, 1, 32, 32, 3840, 32, None),
    "figure 15": (64, 2, 1, 1, 32, 32, 3840, 32, None),
    "figure 16": (64, 8, 8, 1, 128, 32, 15360, 128, None),
    "figure 17": (128, 8, 16, 1, 1, 80, 12288, 96, None),
    "figure 18": (96, 8, 12, 1, 12, 96, 12288, 96, 2),
    "1.7B": (32, 1, 1, 16, 512, 24, 2304, 24, None),
    "3.6B": (64, 2, 1, 16, 512, 30, 3072, 32, None),
    "7.5B": (128, 4, 1, 16, 512, 36, 4096, 32, None),
    "18B": (256, 8, 1, 8, 1024, 40, 6144, 48, None),
    "39B": (512, 8, 2, 4, 1536, 48, 8192, 64, None),
    "76B": (1024, 8, 4, 2, 1792, 60, 10240, 80, 5),
    "145B": (1536, 8, 8, 2, 2304, 80, 12288, 96, 5),
    "310B": (1920, 8, 16, 1, 2160, 96, 16384, 128, 3),
    "530B": (2520, 8, 35, 1, 2520, 105, 20480, 128, 1),
    "1T": (3072, 8, 64, 1, 3072, 128, 25600, 160, None),
}
for name, (processes, t, p, micro, batch, layers, width, heads, chunk) in SC21_RUNS.items():
    interleaved = "" if chunk is None else f"--num-layers-per-virtual-pipeline-stage {chunk}"
    SCRIPTS[f"sc21 {name}"] = Script(
        f"{SC21_FLAGS} --tensor-model-parallel-size {t} --pipeline-model-parallel-size {p} --micro-batch-size {micro} "
        f"--global-batch-size {batch} --num-layers {layers} --hidden-size {width} --num-attention-heads {heads} "
        f"--DDP-impl {'torch' if name in ('1.7B', '3.6B', '7.5B', '18B') else 'local'} {interleaved}",
        processes=processes,
    )

# ---- August 2026

TODAY_BERT = f"""
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
    --attention-backend auto --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000
    --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear
    --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file bert-vocab.json
    --split 949,50,1 {PATHS} {REPORTS} --tensorboard-dir logs
"""
TODAY_GPT = f"""
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto --micro-batch-size 1 --global-batch-size 1536
    --step-batch-size-schedule 0:16_2.4B:320_4.8B:624_7.2B:928_9.6B:1232_12B:1536
    --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
    --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001
    --lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 {BPE}
    --split 949,50,1 {PATHS} {REPORTS} --tensorboard-dir logs
"""
TODAY_LLAMA = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
    --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134
    --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
    --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --data-cache-path cache
    --split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
    --vocab-size 128256 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir logs
"""
LLAMA_H100 = """
    --grad-reduce-in-bf16 --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
"""
LLAMA_FSDP = """
    --no-check-for-nan-in-loss-and-grad --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --no-gradient-accumulation-fusion --init-model-with-meta-device --ckpt-format fsdp_dtensor --use-nccl-ub
    --fsdp-double-buffer --fsdp-manual-registration --logging-level 20 --profile --profile-step-start 8
    --profile-step-end 12 --profile-ranks 0 --record-memory-history
"""
MOCK = "--mock-data --tokenizer-type NullTokenizer --tiktoken-pattern v2"
REAL = "--data-path my_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model llama3"
LLAMA_REFUSED = (
    "--decoupled-lr --decoupled-min-lr --fp8-amax-history-len --fp8-amax-compute-algo --fp8-param-gather"
)
# From examples/gpt3/README.md.
README_SIZES = {"345M": (12, 512, 8, 1024), "857M": (24, 1024, 16, 2048)}
TODAY_GUIDE_8 = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 32 --hidden-size 4096
    --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4
    --global-batch-size 32 --train-iters 100000 --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine
    --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 --bf16 --data-path my_text_document
    --split 949,50,1 --save ckpt --load ckpt --log-interval 10 --save-interval 1000 --eval-interval 1000
"""
TODAY_GUIDE_MP = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2
    --global-batch-size 16 --train-iters 100000 --lr 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine
    --lr-warmup-iters 1000 --weight-decay 0.1 --clip-grad 1.0 --fp16 --data-path my_text_document
    --split 949,50,1 --save ckpt --load ckpt
"""
TODAY_MIXTRAL = """
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path my_text_document
    --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500
    --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt --tensorboard-dir logs
    --no-load-optim --no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B
"""
SCRIPTS |= {
    "today train_bert_340m_distributed": Script(
        TODAY_BERT, processes=128, layout_error="16 stages do not divide --num-layers 24"
    ),
    "today train_gpt3_175b_distributed": Script(
        TODAY_GPT, processes=128, refused="--step-batch-size-schedule"
    ),
    "today train_llama3_8b_h100_fp8, mock": Script(
        f"{TODAY_LLAMA} {LLAMA_H100} {MOCK}", processes=8, refused=LLAMA_REFUSED
    ),
    "today train_llama3_8b_h100_fp8": Script(
        f"{TODAY_LLAMA} {LLAMA_H100} {REAL}", processes=8, refused=LLAMA_REFUSED
    ),
    "today train_llama3_8b_fsdp_h100_fp8": Script(
        f"{TODAY_LLAMA} {LLAMA_FSDP} {MOCK}", processes=8, refused=LLAMA_REFUSED
    ),
    "today guide, Llama": Script(TODAY_GUIDE_8, processes=8),
    "today guide, GPT-3": Script(TODAY_GUIDE_MP, processes=8),
    "today sc21": Script(
        SCRIPTS["sc21 1T"].flags.replace(
            "--checkpoint-activations", "--activations-checkpoint-method uniform"
        ),
        processes=3072,
    ),
    "today train_mixtral_8x7b_distributed": Script(
        TODAY_MIXTRAL,
        processes=64,
        refused="--no-position-embedding",
    ),
}
for name, (layers, width, heads, length) in README_SIZES.items():
    sizes = dict(re.findall(r"(--\S+) ([^-\s]\S*)", TODAY_GPT)) | {
        "--num-layers": layers,
        "--hidden-size": width,
        "--num-attention-heads": heads,
        "--seq-length": length,
        "--max-position-embeddings": length,
        "--tensor-model-parallel-size": 1,
        "--pipeline-model-parallel-size": 1,
    }
    SCRIPTS[f"today gpt3, {name}"] = Script(
        " ".join(f"{flag} {value}" for flag, value in sizes.items()),
        processes=8,
        refused="--step-batch-size-schedule",
    )


def flags_of(script: Script) -> list[tuple[str, list[str]]]:
    """Flags of a script, each with its values."""
    parts = re.split(r"(?:^|\s)(?=--)", f"{script.flags} {script.missing}".strip())
    return [(name, values) for name, *values in (re.split(r"[\s=]+", part.strip()) for part in parts if part)]


def words(flags: list[tuple[str, list[str]]]) -> list[str]:
    return [word for name, values in flags for word in (name, *values)]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_refused_flags_are_listed_in_one_error(script: Script) -> None:
    flags = flags_of(script)
    refused = script.refused.split()
    if refused:
        with pytest.raises(InputError) as error:
            parse_run_config(words(flags), description="a test", defaults={})
        lines = str(error.value).splitlines()
        assert sorted(line.split()[0] for line in lines) == sorted(refused)
        assert all(" is not supported: " in line for line in lines)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_other_flags_set_their_fields(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Each supported flag sets its field and each other flag is noted. The layout fits the processes."""
    flags = [(name, values) for name, values in flags_of(script) if name not in script.refused.split()]
    config = parse_run_config(words(flags), description="a test", defaults={})
    if script.layout_error:
        with pytest.raises(InputError, match=script.layout_error):
            check_layout(config, script.processes)
    else:
        check_layout(config, script.processes)
    ours = {}
    for kind in RunConfig.section_types().values():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            for name in (flag_name(field), *field.metadata["flag"].aliases):
                ours[name] = (
                    next(s for s in config.sections if isinstance(s, kind)),
                    field,
                    value_type(hints[field.name]),
                )
    notes = capsys.readouterr().err
    known = run_parser("", {}).flags
    for name, values in flags:
        if name not in ours:
            flag = known[name].flag
            effect = "is read as" if flag.instead else "has no effect"
            assert f"note: {' '.join([name, *values])} {effect}" in notes or values[0] in flag.harmless
            continue
        part, field, kind = ours[name]
        value = getattr(part, field.name)
        if name == "--sequence-parallel" and config.parallel.tensor_model_parallel_size == 1:
            assert value is False and "--sequence-parallel has no effect" in notes
        elif not values:
            assert value is not field.default
        else:
            assert value == (tuple(map(kind, values)) if field.metadata["flag"].nargs else kind(values[0]))
