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
from megatron.commands.plan import error_band
from megatron.errors import InputError
from megatron.planner.budget import two_digits
from megatron.planner.config import DryRunConfig
from megatron.pretrain_gpt import DEFAULTS

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --global-batch-size 32"


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
        ("h100-pcie", "the error of the step's time is not known: .* those of H100"),
        ("h20", "the error of the step's time is not known: .* those of H100"),
    ],
)
def test_an_error_is_claimed_only_of_gpus_with_published_runs(plan, gpu: str, error: str):
    out = plan(f"{SMALL} --gpus 1 --gpu {gpu} --layout b4")
    assert re.search(rf"^  note    {error}", out, re.MULTILINE)


def test_mixtures_on_old_gpus_have_the_error_of_newer_ones():
    assert "of mixtures on GPUs of newer generations than A100, without" in error_band("a100", mixture=True)
    assert "of mixtures on GPUs of the generation of H100, without" in error_band("h100-80gb", mixture=True)


def test_flags_of_the_model_that_a_plan_leaves_out_are_named(plan):
    flags = "--moe-expert-capacity-factor 1.5 --moe-shared-expert-overlap"
    experts = "--num-experts 4 --moe-shared-expert-intermediate-size 512 --disable-bias-linear"
    out = plan(f"{SMALL} --gpus 4 {experts} {flags}")
    assert all(f"  note    {flag}: " in out for flag in flags.replace(" 1.5", "").split())


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
        (f"{SMALL} --gpus 4 --gpu gh200", "--gpu gh200-96gb: no standard node has more than 2"),
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
        (
            "--model mixtral-8x7b --gpu h100 --gpus 16 --moe-ffn-hidden-size 14372",
            "--moe-ffn-hidden-size: 14372 is not a multiple of 8, as --moe-grouped-gemm needs in bf16",
        ),
        (
            "--model llama3-8b --gpu l40s --tokens 1e12 --days 30",
            "--days: no number of GPUs up to 8, the most without a file for --cluster, .* or another --gpu",
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
    program = (
        "import sys; sys.path[:0] = ['tools', '.']; from megatron.commands import plan; "
        f"plan.main('{SMALL} --gpus 8'.split()); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("\nFalse\n"), done.stderr


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
