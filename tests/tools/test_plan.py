"""tools/plan.py: plans, commands, figures and errors."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.arguments import parse_run_config
from megatron.commands import plan as plan_command
from megatron.errors import InputError
from megatron.planner.budget import two_digits
from megatron.planner.config import DryRunConfig
from megatron.pretrain_gpt import DEFAULTS

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --global-batch-size 32"

# The flags of a command that a description of a model lacks.
SHORT_RUN = "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 511 --lr 1e-4 --train-iters 1"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    def run(flags: str) -> str:
        plan_command.main(shlex.split(flags))
        return capsys.readouterr().out

    return run


def test_a_named_model_is_planned(plan, tmp_path: Path):
    files = {name: tmp_path / name for name in ("plans.json", "trace.json", "picture.svg")}
    out = plan(
        f"--model 8.3b --gpus 64 --tokens 100e9 --explain --json {files['plans.json']} --trace {files['trace.json']} "
        f"--picture {files['picture.svg']}"
    )
    assert out.startswith("8.3b: 8.3")
    assert "64 a100-80gb (8 nodes of 8, bf16)" in out
    assert len(re.findall(r"^ {1,2}\d+ .*T\d+ P\d+ D\d+", out, re.M)) == 10
    for words in ("days", "GPU-hours", "GB free", "Single changes", "does not fit", "takeaway 1"):
        assert words in out

    plans = json.loads(files["plans.json"].read_text())["plans"]
    seconds = [p["step"]["seconds"] for p in plans]
    assert seconds == sorted(seconds)
    days = 100e9 / (512 * 1024) * seconds[0] / 86400
    assert f"{two_digits(days)} days" in out
    assert out.count(f"--train-samples {-(-100 * 10**9 // 1024)}") == 2
    dry = shlex.split(out[out.index("python pretrain_gpt.py") :].replace("\\\n", " "))[2:]
    config = parse_run_config(dry, description="", defaults=DEFAULTS)
    assert config.plugin(DryRunConfig).world_size == 64 and config.tokenizer.vocab_size + 1 == 51200

    layout = plans[0]["layout"]
    events = json.loads(files["trace.json"].read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(layout["pipeline"]))
    computes = [e for e in events if e.get("cat") in ("forward", "backward")]
    m = 512 // (layout["data"] * layout["micro_batch_size"])
    assert len(computes) == 2 * m * layout["chunks"] * layout["pipeline"]
    end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert end / 1e6 == pytest.approx(seconds[0], rel=0.01)
    assert files["picture.svg"].read_text().startswith("<svg")


def test_the_printed_command_is_valid(plan, tmp_path: Path):
    out = plan(
        f"{SMALL} --gpus 8 --swiglu --kv-channels 96 --group-query-attention --num-query-groups 4 "
        f"--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --json {tmp_path / 'plans.json'}"
    )
    assert "one node" in out
    for best in json.loads((tmp_path / "plans.json").read_text())["plans"]:
        words = shlex.split(best["command"].replace("\\\n", " "))
        flags = words[words.index("pretrain_gpt.py") + 1 :]
        rest = "--mock-data --tokenizer-type NullTokenizer --vocab-size 511 --train-iters 1 --lr 1e-4"
        config = parse_run_config([*flags, *rest.split()], description="", defaults=DEFAULTS)
        layout = best["layout"]
        assert config.parallel.tensor_model_parallel_size == layout["tensor"]
        assert config.parallel.pipeline_model_parallel_size == layout["pipeline"]
        assert config.training.micro_batch_size == layout["micro_batch_size"]
        assert config.training.bf16
        model = config.model
        assert (model.ffn_hidden_size, model.num_query_groups, model.kv_channels) == (1344, 4, 96)
        assert not config.model.add_bias_linear


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_printed_command_has_the_number_of_query_groups(plan, groups: int):
    """Needed for as many groups as heads, too, since --group-query-attention alone makes one group."""
    out = plan(f"{SMALL} --gpus 1 --group-query-attention --num-query-groups {groups}")
    assert "--group-query-attention" in out
    assert ("--num-query-groups" in out) == (groups > 1)


def test_a_cluster_file(plan, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "device: {name: laptop, precision: fp32, peak: 0.1 TFLOP/s, memory: 8 GB, bandwidth: 20 GB/s}\n"
        "devices-per-node: 2\nnodes: 1\nlink: {bandwidth: 1 GB/s, latency: 50 us}\n"
    )
    out = plan(f"{SMALL} --cluster {tmp_path / 'mine.yaml'}")
    assert "2 laptop (one node, fp32)" in out
    assert "--nproc-per-node 2 --nnodes 1 \\" in out
    assert "--bf16" not in out
    assert "no error is known for clusters described in a file" in out


def test_questions_are_answered(plan):
    out = plan(f"{SMALL} --gpus 16 --what-if --longest-seq-length")
    assert re.search(r"longest sample that fits the cluster, by memory alone: [\d,]+ tokens, in T\d", out)
    assert re.search(
        r"in this layout samples of up to [\d,]+ tokens fit, or microbatches of up to [\d,]+ samples? of 512 tokens",
        out,
    )
    for words in ("network", "links within a node", "memory", "matrix products"):
        assert re.search(rf"  {words} twice as \w+ +(no faster|[\d.]+% faster)", out)
    out = plan(f"{SMALL} --tokens 1e11 --days 2")
    assert re.match(r"the fewest GPUs that train on 100 billion tokens in 2 days: \d+\n", out)
    assert 1 < float(re.search(r" steps: ([\d.]+) days", out)[1]) <= 2


def test_a_plan_with_fp8(plan):
    flags = f"{SMALL} --gpus 8 --gpu h100-80gb"
    out = plan(f"{flags} --fp8-format hybrid")
    assert "8 h100-80gb (one node, bf16, FP8 products)" in out
    assert out.count("--bf16 --fp8-format hybrid") == 2 and "fp8" not in plan(flags)


@pytest.mark.parametrize(
    ("gpu", "error"),
    [
        (
            "a100",
            r"the step's time is \+-\d+%: the mean error over published runs of dense models on GPUs of",
        ),
        ("mi300x", r"the step's time is \+-\d+%: a guess, since speeds of MI300X are those of public tests"),
        (
            "t4",
            "the error of the step's time is not known: no runs on this GPU are published, .* those of A100",
        ),
        ("l40s", "the error of the step's time is not known: "),
    ],
)
def test_an_error_is_claimed_only_of_gpus_with_published_runs(plan, gpu: str, error: str):
    out = plan(f"{SMALL} --gpus 1 --gpu {gpu} --layout b4")
    assert re.search(rf"^  note    {error}", out, re.MULTILINE)


def test_layouts_in_fp8_are_those_that_training_takes(plan):
    """An MLP of 2,080 on two ranks has 1,040 channels, a multiple of 16, and on four 520."""
    flags = f"{SMALL} --ffn-hidden-size 2080 --gpus 8 --gpu h100"
    for tensor, fp8 in ((2, "--fp8-format hybrid"), (4, "")):
        assert f"The best: T{tensor} " in plan(f"{flags} --layout T{tensor} {fp8}")
    with pytest.raises(InputError, match=r"--layout: T4: T4 .* into sizes that FP8 products take"):
        plan(f"{flags} --layout T4 --fp8-format hybrid")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--model or --num-layers is required"),
        (
            "--num-layers 2 --hidden-size 64 --num-attention-heads 2",
            "--seq-length is required without --model",
        ),
        (SMALL, "--gpus or --cluster is required"),
        (f"{SMALL} --gpus 8 --gpu a101", "--gpu: 'a101' is not a known GPU; known are .*a100-80gb"),
        (f"{SMALL} --gpus 12", "--gpus: 12 a100-80gb do not fill nodes of 8; choose 8 or 16"),
        (f"{SMALL} --gpus 16 --gpu l40s", "--gpu l40s: no standard node has more than 8"),
        (f"{SMALL} --gpus 16 --cluster x.yaml", "--gpus: contradicts --cluster"),
        (f"{SMALL} --gpu t4 --cluster x.yaml", "--gpu: contradicts --cluster"),
        (
            f"{SMALL} --max-position-embeddings 256",
            "--seq-length: 512 is longer than --max-position-embeddings 256",
        ),
        (
            f"{SMALL} --gpus 8 --position-embedding-type alibi",
            "--position-embedding-type: alibi is not planned",
        ),
        (f"{SMALL} --gpus 8 --picture here.gif", r"--picture: here\.gif must end with \.svg or \.png"),
        (
            f"{SMALL} --gpus 8 --trace /none/here.json",
            r"--trace: /none/here\.json cannot be written: there is no directory /none$",
        ),
        (
            "--model 145.6b --gpus 8",
            "no layout fits this model on 8 a100-80gb .*; the smallest cluster that fits it has",
        ),
        (
            f"{SMALL} --gpus 8 --fp8-format e4m3",
            "--fp8-format: a100-80gb in bf16 has no peak of FP8 products; choose another --gpu",
        ),
        (
            "--model deepseek-r1 --gpu h20 --gpus 8",
            r"the smallest cluster that fits it has \d+ of them \(.*\), in nodes that a file for --cluster describes",
        ),
        (
            "--model qwen3-30b-a3b --gpu h100 --gpus 16 --fp8-format hybrid",
            "--fp8-format: hybrid is for dense layers, and --num-experts 128 adds products of experts; leave one out",
        ),
        (
            f"{SMALL} --gpu h100 --gpus 8 --fp8-format hybrid --ffn-hidden-size 2056",
            "--fp8-format: --ffn-hidden-size 2056 is not a multiple of 16",
        ),
        ("--model 7b", "--model: '7b' may be one of .*llama2-7b, .*mistral-7b, qwen2.5-7b; choose one"),
        ("--model lama3-9b", "--model: 'lama3-9b' is not a known model; close are .*llama3-8b"),
        ("--model llama3-8b", "--gpus or --cluster is required with --model llama3-8b"),
        (
            f"{SMALL} --layout T2P8V2",
            "--gpus or --cluster, or D in --layout T2P8V2, is required without --model",
        ),
        (f"{SMALL} --layout T3P2D2", "--layout T3P2D2: 12 a100-80gb do not fill nodes of 8; choose 8 or 16"),
        (
            "--model 175b --micro-batch-size 4",
            "--micro-batch-size is not a flag .*; --layout T8P4D8b1 plans given",
        ),
        ("--calibrate x.yaml --gpus 8", "--calibrate: measures this machine alone; leave out --gpus"),
        (f"--calibrate {ROOT}", "--calibrate: .* cannot be written: it is a directory"),
    ],
)
def test_bad_input(plan, flags: str, message: str):
    with pytest.raises(InputError, match=message) as error:
        plan(flags)
    assert "\n" not in str(error.value)


def test_a_png_needs_matplotlib(plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"needs matplotlib for PNG: pip install matplotlib"):
        plan(f"{SMALL} --gpus 8 --picture {tmp_path / 'x.png'}")


def test_planning_does_not_import_torch():
    program = "import sys; sys.path[:0] = ['tools', '.']; import plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.slow
def test_a_plan_for_a_calibrated_cpu(plan, command, tmp_path: Path):
    """Takes a minute on an idle machine. Runs in a process of its own, which starts others."""
    command("tools/plan.py", "--calibrate", tmp_path / "here.yaml")
    out = plan(f"{SMALL} --cluster {tmp_path / 'here.yaml'}")
    assert re.search(r"on \d+ cpu \(one node, fp32\)", out)


def test_a_png_is_drawn(plan, tmp_path: Path):
    pytest.importorskip("matplotlib")
    plan(f"{SMALL} --gpus 8 --picture {tmp_path / 'x.png'}")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


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
        (
            "--gpus 1024 -- {} --data-parallel-sharding-strategy optim_grads_params",
            "--data-parallel-sharding-strategy: optim_grads_params is planned only with",
        ),
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


def test_flags_that_a_plan_leaves_out_are_named(plan):
    flags = "--tp-comm-overlap --overlap-param-gather --reset-attention-mask"
    out = plan(f"--gpu h100 --gpus 1024 -- {LLAMA_70B} {flags}")
    assert all(f"  note    {flag}: " in out for flag in flags.split())
    assert "--tp-comm-overlap" not in plan(f"--gpu h100 --gpus 1024 -- {LLAMA_70B}")
