"""tools/plan.py after --: predictions of training commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.errors import InputError

SMALL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --global-batch-size 32"
# The flags of a command that a description of a model lacks.
SHORT_RUN = "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 511 --lr 1e-4 --train-iters 1"
LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --swiglu --ffn-hidden-size 28672 "
    "--group-query-attention --num-query-groups 8 --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 8192 "
    "--max-position-embeddings 8192 --global-batch-size 2048 --micro-batch-size 1 --tensor-model-parallel-size 4 "
    "--sequence-parallel --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 2 "
    "--use-distributed-optimizer --overlap-grad-reduce --bf16 --hidden-dropout 0 --attention-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 128255 --lr 1e-4 --train-iters 1"
)


def test_the_layout_of_a_command_is_predicted(plan, tmp_path: Path):
    files = (
        f"--json {tmp_path / 'plan.json'} --trace {tmp_path / 'trace.json'} --picture {tmp_path / 'a.svg'}"
    )
    out = plan(
        f"--gpu h100 --gpus 1024 --tokens 1e12 --gpu-hour-price 2 {files} -- pretrain_gpt.py {LLAMA_70B}"
    )
    (found,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert (found["layout"]["tensor"], found["layout"]["pipeline"], found["layout"]["chunks"]) == (4, 8, 5)
    assert len({e["pid"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}) == 8
    assert (tmp_path / "a.svg").read_text().count(">stage ") == 8
    assert out.startswith("given layout: 70.55 billion parameters on 1,024 h100-80gb")
    assert "T4 P8 D32, V5, microbatch 1, sequence parallel, distributed optimizer" in out
    assert "at $2 for a GPU-hour" in out and "Single changes" in out
    out = plan(f"--gpu h100 --gpus 1024 -- {LLAMA_70B} --context-parallel-size 2")
    assert (
        "T4 C2 P8 D16, V5, microbatch 1, sequence parallel, distributed optimizer" in out and "C4 D8" in out
    )


def test_faster_hardware_is_credited_with_the_hardware_alone(plan):
    """The same choice of a layout on both sides: a given one stays, and sizes that are given stay."""
    flags = "--gpu h100 --gpus 64 --what-if"
    command = LLAMA_70B.replace("batch-size 2048", "batch-size 64").replace("-layers 80", "-layers 16")
    out = plan(f"{flags} -- pretrain_gpt.py {command}")
    asked = out.split("What if (in the given layout):\n")[1]
    assert re.search(r"  memory twice as large +no faster$", asked, re.MULTILINE), asked
    assert re.search(r"  matrix products twice as fast +[\d.]+% faster$", asked, re.MULTILINE), asked
    out = plan(f"{SMALL} {flags} --layout T8P2D4V1b1")
    asked = out.split("What if (each with the best layout of these sizes):\n")[1]
    assert len(re.findall("twice as", asked)) == 5 and all(
        "T8 P2 D4" in x for x in re.findall(": (T.*)", asked)
    )


def test_single_changes_change_something(plan):
    """A command with one stage has no schedule to change, and keeps its choice about the overlap of reductions."""
    command = LLAMA_70B.replace(
        "--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 2 ", ""
    )
    for overlap in ("--overlap-grad-reduce", ""):
        flags = command.replace("--overlap-grad-reduce", overlap)
        # The command says how many GPUs there are.
        out = plan(f"--gpu h100 -- torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py {flags}")
        assert "usable; it does not fit: " in out and " GB too many" in out
        changes = out.split("Single changes to it:\n")[1]
        assert not re.search("schedule|stages|interleaving|  distributed optimizer|no recomputation", changes)
        assert ("overlapped gradient reduction " in changes) == (not overlap)


@pytest.mark.parametrize(
    ("stages", "even"),
    [
        (
            "--decoder-first-pipeline-num-layers 19 --decoder-last-pipeline-num-layers 19",
            "as fast|[0-9.]+% faster",
        ),
        ("--pipeline-schedule gpipe", ""),
        ("--pipeline-schedule auto", ""),
    ],
)
def test_single_changes_keep_the_rest(plan, stages: str, even: str):
    """Uneven stages belong to a number of stages, and schedules that a search does not try stay."""
    command = LLAMA_70B.replace("--num-layers-per-virtual-pipeline-stage 2 ", "").replace(
        "size 8 --", "size 4 --"
    )
    command = command.replace(
        "--tensor-model-parallel-size 4 --sequence", "--tensor-model-parallel-size 8 --sequence"
    )
    command = command.replace("--overlap-grad-reduce", "").replace("batch-size 2048", "batch-size 32")
    out = plan(f"--gpu h100 --gpus 64 -- {command} {stages}")
    assert re.search("^T8 P4 D2, (uneven stages|gpipe|auto), microbatch 1", out, re.MULTILINE)
    changes = out.split("Single changes to it:\n")[1]
    assert "T4 P8 " in changes and "full recomputation " in changes
    assert bool(re.search("stages of equal numbers of layers +", changes)) == bool(even)
    if even:
        assert re.search(f"stages of equal numbers of layers +({even})", changes), changes
    else:
        # Only the change of the schedule makes it 1F1B.
        assert "1F1B or interleaving " in changes and "no interleaving" not in changes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 1024 --seq-length 4 -- {}", "--seq-length cannot be given before --"),
        (
            "--gpus 1000 -- {}",
            "--tensor-model-parallel-size 4 x --pipeline-model-parallel-size 8 needs a multiple",
        ),
        (
            "--gpus 1024 -- {} --recompute-granularity full --recompute-method block",
            "--recompute-method: block is",
        ),
        (
            "--gpus 1024 -- {} --context-parallel-size 4 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2",
            "--cp-comm-type: a2a+p2p is not planned",
        ),
        (
            "--gpus 1024 -- pretrain_bert.py {}",
            "-- pretrain_bert.py: only commands of pretrain_gpt.py are planned",
        ),
        ("--gpus 1024 -- bash train.sh {}", "names neither pretrain_gpt.py nor pretrain_bert.py"),
        (
            "--gpus 1024 -- torchrun --nnodes 64 --nproc-per-node 8 pretrain_gpt.py {}",
            "-- torchrun: starts 512 processes, and the cluster has 1024 devices; make them equal",
        ),
        ("--gpus 1024 -- {} --no-such-flag", "--no-such-flag is not a flag"),
        ("--gpu h100 --", "-- must be followed by a training command or its flags"),
        (
            "--gpu h100 -- {}",
            "the number of GPUs is required: give --gpus, --cluster, or a torchrun command",
        ),
        ("--model 175b --gpu-watts 700", "--gpu-watts needs --tokens"),
        ("--model 175b --days 7", "--days needs --tokens"),
        (
            "--model 175b --checkpoint-seconds 5",
            "--checkpoint-seconds needs --gpu-hours-between-failures",
        ),
        ("--model 175b --restart-minutes 5", "--restart-minutes needs --gpu-hours-between-failures"),
        ("--model 175b --days 7 --tokens 1e9 --gpus 8", "--days: finds the number of GPUs"),
        ("--gpus 8 --longest-seq-length -- {}", "--longest-seq-length cannot be given before --"),
        ("--gpus 1024 -- {} --optimizer muon", "--optimizer: muon is not planned; a dry run counts it"),
        ("--gpus 1024 -- {} --bf16-optimizer-states", "--bf16-optimizer-states is not planned"),
        ("--gpus 1024 -- {} --grad-reduce-in-bf16", "--grad-reduce-in-bf16 is not planned"),
        ("--gpus 1024 -- {} --freeze embedding.*", "--freeze is not planned"),
        (
            "--gpus 1024 -- {} --fp8-format hybrid --fp8-recipe rowwise",
            "--fp8-recipe: rowwise is not planned",
        ),
        (
            "--gpu h100 --gpus 1024 -- {} --fp8-format hybrid --first-last-layers-bf16 --num-layers-at-end-in-bf16 8",
            "--first-last-layers-bf16 is not planned",
        ),
        ("--gpus 1024 -- {} --no-torch-compile", "--no-torch-compile is planned only with"),
        ("--gpus 1024 -- {} --ops-backend plain", "--ops-backend: plain is planned only with"),
        ("--gpu v100 --gpus 1024 -- {}", "--bf16: v100-32gb is planned in fp16; give --fp16 instead"),
    ],
)
def test_bad_commands_are_refused(plan, flags: str, message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        plan(flags.format(LLAMA_70B))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--distribute-saved-activations --recompute-granularity full",
            "--distribute-saved-activations is not",
        ),
        ("--position-embedding-type alibi", "--position-embedding-type: alibi is not planned"),
    ],
)
def test_a_command_is_planned_as_it_is_or_not_at_all(plan, flags: str, message: str):
    command = LLAMA_70B.replace("--sequence-parallel ", "").replace("--position-embedding-type rope ", "")
    with pytest.raises(InputError, match=message):
        plan(f"--gpus 1024 -- {command} {flags}")


def test_the_precision_of_a_command_is_that_of_the_cluster(plan, tmp_path: Path):
    command, file = f"{SMALL} {SHORT_RUN}", tmp_path / "mine.yaml"
    with pytest.raises(
        InputError, match="--bf16 is required: h100-80gb is planned in bf16, and the command is in fp32"
    ):
        plan(f"--gpu h100 --gpus 8 -- {command}")
    halves = {name: plan(f"--gpu h100 --gpus 8 -- {command} --{name}") for name in ("bf16", "fp16")}
    assert "8 h100-80gb (one node, fp16)" in halves["fp16"]
    assert halves["fp16"].replace("fp16", "bf16") == halves["bf16"]
    file.write_text(
        "device: {name: cpu, precision: fp32, peak: 0.1 TFLOP/s, memory: 8 GB, bandwidth: 20 GB/s}\n"
        "devices-per-node: 2\nnodes: 1\nlink: {bandwidth: 1 GB/s, latency: 50 us}\n"
    )
    assert "2 cpu (one node, fp32)" in plan(f"--cluster {file} -- {command}")
    with pytest.raises(InputError, match="--bf16: cpu is planned in fp32; leave the flag out"):
        plan(f"--cluster {file} -- {command} --bf16")


def test_an_overlapped_gather_is_a_single_change(plan):
    command = LLAMA_70B.replace(
        "--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 2 ", ""
    )
    for flag in ("--overlap-param-gather", ""):
        out = plan(f"--gpu h100 --gpus 1024 -- {command} {flag}")
        assert ("overlapped parameter gather " in out) == (not flag)


def test_flags_that_a_plan_leaves_out_are_named(plan):
    flags = "--tp-comm-overlap --reset-attention-mask"
    out = plan(f"--gpu h100 --gpus 1024 -- {LLAMA_70B} {flags}")
    assert all(f"  note    {flag}: " in out for flag in flags.split())
    assert "--tp-comm-overlap" not in plan(f"--gpu h100 --gpus 1024 -- {LLAMA_70B}")
    command = LLAMA_70B.replace("--train-iters 1", "--train-samples 4096000")
    out = plan(f"--gpu h100 --gpus 1024 -- {command} --rampup-batch-size 1024 1024 2048000")
    assert "  note    --rampup-batch-size: " in out
