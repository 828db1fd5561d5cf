"""The scripts of published sizes against the papers' tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkout import RUN, Checkout, commands

from megatron.arguments import parse_run_config
from megatron.checkpoint.config import CheckpointConfig
from megatron.model.context import ModelContext
from megatron.model.flops import attended_pairs, attention_flops, flops_per_sample
from megatron.pretrain_gpt import DEFAULTS, build_model
from megatron.reports.flops import unused_parameters
from megatron.training.config import RunConfig
from megatron.training.layout import check_layout

ROOT = Path(__file__).resolve().parents[2]
# Parameters in billions, heads, hidden size, layers, T, P, GPUs, global batch.
TABLE = {
    # arXiv 1909.08053, table 1
    "1.2b": (1.2, 16, 1536, 40, 1, 1, 64, 512),
    "2.5b": (2.5, 20, 1920, 54, 2, 1, 128, 512),
    "4.2b": (4.2, 24, 2304, 64, 4, 1, 256, 512),
    "8.3b": (8.3, 32, 3072, 72, 8, 1, 512, 512),
    # arXiv 2104.04473, table 1
    "1.7b": (1.7, 24, 2304, 24, 1, 1, 32, 512),
    "3.6b": (3.6, 32, 3072, 30, 2, 1, 64, 512),
    "7.5b": (7.5, 32, 4096, 36, 4, 1, 128, 512),
    "18.4b": (18.4, 48, 6144, 40, 8, 1, 256, 1024),
    "39.1b": (39.1, 64, 8192, 48, 8, 2, 512, 1536),
    "76.1b": (76.1, 80, 10240, 60, 8, 4, 1024, 1792),
    "145.6b": (145.6, 96, 12288, 80, 8, 8, 1536, 2304),
    "310.1b": (310.1, 128, 16384, 96, 8, 16, 1920, 2160),
    "529.6b": (529.6, 128, 20480, 105, 8, 35, 2520, 2520),
    "1t": (1008.0, 160, 25600, 128, 8, 64, 3072, 3072),
    # arXiv 2005.14165, table 2.1; GPUs of arXiv 2104.04473, section 5.1
    "175b": (174.6, 96, 12288, 96, 8, 16, 1024, 1536),
    # arXiv 1909.08053, section 5.2, with the batch size of NVIDIA's example
    "345m": (0.355, 16, 1024, 24, 1, 1, 1, 8),
}

# Billions of parameters and of active ones, experts, stages, ranks that divide the experts, GPUs, global batch, and
# GB of the rank that needs most.
MIXTURES = {
    "mixtral_8x7b": (46.7, 12.9, 8, 4, 8, 64, 256, 62.4),
    "qwen3_30b_a3b": (30.5, 3.35, 128, 1, 16, 16, 1024, 56.3),
    "deepseek_v3": (671.0, 37.55, 256, 16, 64, 2048, 15360, 28.0),
}
# GFLOP of a token, with half of the square of attention: published TFLOP/s over tokens/s of Megatron-Core in bf16, on 8
# H100 (Qwen3) and on 256 GB300 without multi-token prediction (DeepSeek-V3).
PUBLISHED_GFLOP = {"qwen3_30b_a3b": 277 / 12.040, "deepseek_v3": 961 / 3.848}
# Sequence length, tensor- and context-parallel size, GPUs, global batch, and GB of a rank. The first has layout and
# batch of NVIDIA's published run on 64 H100 (NeMo 2).
LONG = {
    "llama3_8b_8k": (8192, 1, 2, 64, 1024, 70.5),
    "llama3_8b_32k": (32768, 2, 4, 32, 128, 48.1),
    "llama3_8b_128k": (131072, 4, 8, 64, 32, 34.7),
}


def test_every_script_has_its_row() -> None:
    assert {f"pretrain_gpt_{size}.sh" for size in TABLE | MIXTURES | LONG} == {
        path.name for path in (ROOT / "scripts").glob("pretrain_gpt_*.sh")
    }


def parameters(config: RunConfig, vocab_size: int) -> int:
    context = ModelContext(vocab_size=vocab_size, padded_vocab_size=vocab_size)
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config, context, None).parameters())


@pytest.mark.parametrize("size", TABLE)
def test_a_size_matches_its_paper(checkout: Checkout, size: str) -> None:
    billions, heads, hidden, layers, tensor, stages, gpus, batch = TABLE[size]
    (dry,) = commands(checkout.run(f"pretrain_gpt_{size}.sh", "--dry-run", "--lr", "1"))
    assert dry[:2] == ["python3", "pretrain_gpt.py"] and dry[-2:] == ["--world-size", str(gpus)]
    words = [word for word in dry[2:-2] if word != "--dry-run"]
    config = parse_run_config(words, description="", defaults=DEFAULTS)
    assert config.optimizer.lr == 1 and config.data.mock_data and config.checkpoint.save is None
    model, parallel = config.model, config.parallel
    assert (model.num_attention_heads, model.hidden_size, model.num_layers) == (heads, hidden, layers)
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (tensor, stages)
    assert config.training.global_batch_size == batch
    check_layout(config, gpus)
    # The papers pad GPT-2's 50,257 ids to 51,200, which all layouts divide.
    each = config.tokenizer.make_vocab_size_divisible_by * tensor
    padded = -(-50257 // each) * each
    assert padded == (50304 if size == "345m" else 51200)
    assert parameters(config, padded) / 1e9 == pytest.approx(billions, abs=0.05 if billions > 1 else 0.0005)


@pytest.mark.parametrize("size", MIXTURES)
def test_a_mixture_has_its_published_layout(checkout: Checkout, size: str) -> None:
    billions, active, experts, stages, divided, gpus, batch, _ = MIXTURES[size]
    (dry,) = commands(checkout.run(f"pretrain_gpt_{size}.sh", "--dry-run", "--lr", "1"))
    assert dry[-2:] == ["--world-size", str(gpus)]
    words = [word for word in dry[2:-2] if word != "--dry-run"]
    config = parse_run_config(words, description="", defaults=DEFAULTS)
    model, parallel = config.model, config.parallel
    assert (model.num_experts, parallel.pipeline_model_parallel_size) == (experts, stages)
    assert (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size) == (divided, 1)
    assert config.training.global_batch_size == batch and config.optimizer.lr == 1
    check_layout(config, gpus)
    assert config.tokenizer.vocab_size is not None
    total = parameters(config, config.tokenizer.vocab_size + 1)
    assert total / 1e9 == pytest.approx(billions, abs=0.05)
    assert (total - unused_parameters(model)) / 1e9 == pytest.approx(active, abs=0.05)
    if size in PUBLISHED_GFLOP:
        length, vocabulary = config.data.seq_length, config.tokenizer.vocab_size + 1
        flops = flops_per_sample(
            model, seq_length=length, padded_vocab_size=vocabulary, num_logits=length
        ) - 1.5 * attention_flops(model, pairs=sum(attended_pairs(model, length, causal=False)))
        assert flops / length / 1e9 == pytest.approx(PUBLISHED_GFLOP[size], rel=0.005)


@pytest.mark.parametrize("size", LONG)
def test_a_long_context_has_its_layout(checkout: Checkout, size: str) -> None:
    length, tensor, context, gpus, batch, _ = LONG[size]
    (dry,) = commands(checkout.run(f"pretrain_gpt_{size}.sh", "--dry-run", "--lr", "1"))
    assert dry[-2:] == ["--world-size", str(gpus)]
    words = [word for word in dry[2:-2] if word != "--dry-run"]
    config = parse_run_config(words, description="", defaults=DEFAULTS)
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.context_parallel_size) == (tensor, context)
    assert (config.data.seq_length, config.training.global_batch_size) == (length, batch)
    check_layout(config, gpus)
    assert parameters(config, 128256) / 1e9 == pytest.approx(8.03, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("size", LONG)
def test_a_long_context_fits_its_gpus(size: str, tmp_path: Path) -> None:
    """GPUs with 80 GB. Each rank has 4,096 positions, so that all have the same activations."""
    file = tmp_path / "counts.json"
    script = ["bash", ROOT / "scripts" / f"pretrain_gpt_{size}.sh", "--dry-run", "--dry-run-json", file]
    subprocess.run(script, check=True, env=os.environ | {"PYTHON": sys.executable})
    memory = json.loads(file.read_text())["ranks"][0]["memory"]
    assert memory["peak"] / 1e9 == pytest.approx(LONG[size][-1], rel=0.02)
    assert memory["activations"] / 1e9 == pytest.approx(21, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("size", MIXTURES)
def test_a_mixture_fits_its_published_cluster(size: str, tmp_path: Path) -> None:
    """GPUs with 80 GB. Every token passes each layer's experts twice per pass, to their ranks and back."""
    file = tmp_path / "counts.json"
    script = ["bash", ROOT / "scripts" / f"pretrain_gpt_{size}.sh", "--dry-run", "--dry-run-ranks", "0"]
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([*script, "--dry-run-json", file], check=True, env=environment)
    record = json.loads(file.read_text())
    billions, active, *_, gigabytes = MIXTURES[size]
    assert record["parameters"] / 1e9 == pytest.approx(billions, abs=0.05)
    assert record["active parameters"] / 1e9 == pytest.approx(active, abs=0.05)
    assert record["ranks"][0]["memory"]["peak"] / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize("size", ["345m", "8.3b", "175b"])
def test_a_size_trains_on_data(checkout: Checkout, size: str) -> None:
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "GPUS_PER_NODE": "8"}
    done = checkout.run(f"pretrain_gpt_{size}.sh", "--bf16", **RUN | nodes | {"DATA_PATH": "0.3 a 0.7 b"})
    (training,) = commands(done)
    assert re.search("torch.distributed.run --nproc-per-node 8 --nnodes 2 --node-rank 1", " ".join(training))
    words = training[training.index("pretrain_gpt.py") + 1 :]
    config = parse_run_config(words, description="", defaults=DEFAULTS)
    assert config.data.data_path == ("0.3", "a", "0.7", "b") and config.tokenizer.merge_file == "m.txt"
    assert config.checkpoint.save == config.checkpoint.load == "run"
    assert config.training.bf16 and not config.training.fp16


@pytest.mark.slow
@pytest.mark.parametrize("size", TABLE)
def test_a_size_fits_the_gpus_of_its_paper(size: str, tmp_path: Path) -> None:
    """V100 with 32 GB, or A100 with 80 GB."""
    file = tmp_path / "counts.json"
    script = ["bash", ROOT / "scripts" / f"pretrain_gpt_{size}.sh", "--dry-run", "--dry-run-ranks", "0"]
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([*script, "--dry-run-json", file], check=True, env=environment)
    record = json.loads(file.read_text())
    billions = TABLE[size][0]
    assert record["parameters"] / 1e9 == pytest.approx(billions, abs=0.06 if billions > 1 else 0.001)
    v100 = size in ("345m", "1.2b", "2.5b", "4.2b", "8.3b")
    assert record["ranks"][0]["memory"]["peak"] < (32e9 if v100 else 80e9)


@pytest.mark.parametrize("load", [["--load", "first"], ["--load=first"]])
def test_a_second_stage_starts_and_resumes_with_one_command(checkout: Checkout, load: list[str]) -> None:
    given, one = ["--finetune", *load, "--ckpt-step", "7", "--lr", "1"], {"NNODES": "1", "GPUS_PER_NODE": "1"}

    def training(*flags: str) -> tuple[CheckpointConfig, float | None]:
        (command,) = commands(checkout.run("pretrain_gpt_llama3_8b_32k.sh", *flags, **RUN | one))
        words = command[command.index("pretrain_gpt.py") + 1 :]
        config = parse_run_config(words, description="", defaults=DEFAULTS)
        return config.checkpoint, config.optimizer.lr

    first, lr = training(*given)
    assert (first.load, first.save, first.finetune, first.ckpt_step, lr) == ("first", "run", True, 7, 1)
    (checkout.root / "run").mkdir()
    tracker = checkout.root / "run" / "latest_checkpointed_iteration.txt"
    tracker.touch()  # as a full disk leaves it
    assert training(*given) == (first, 1)
    tracker.write_text("5")
    again, lr = training(*given)
    assert (again.load, again.save, again.finetune, again.ckpt_step, lr) == ("run", "run", False, None, 1)
    # Nothing else is left out: the program refuses a folder that holds another run.
    elsewhere, _ = training(*given, "--save", "other")
    assert (elsewhere.load, elsewhere.save, elsewhere.finetune) == ("first", "other", True)
    assert training("--load", "first")[0].load == "first"
    for load in (["--load", "run"], ["--load=run/"]):
        same, _ = training("--finetune", *load)
        assert same.finetune and same.load is not None and same.load.rstrip("/") == same.save == "run"


def test_flags_and_variables_override_the_script(checkout: Checkout) -> None:
    (dry,) = commands(checkout.run("pretrain_gpt_1t.sh", "--dry-run", "--fp16", "--world-size=1536"))
    assert "--bf16" not in dry and "--world-size" not in dry
    (dry,) = commands(checkout.run("pretrain_gpt_1t.sh", "--dry-run", NNODES="192"))
    assert dry[-2:] == ["--world-size", "1536"]
    (mock,) = commands(checkout.run("pretrain_gpt_345m.sh", "--mock-data", PYTHON=str(checkout.python)))
    assert mock[0] == str(checkout.python) and mock.count("--mock-data") == 1 and "--save" not in mock


def test_a_dry_run_runs_nothing_else(checkout: Checkout) -> None:
    done = checkout.run("pretrain_gpt.sh", "--dry-run", **RUN)
    assert [c[1] for c in commands(done)] == ["pretrain_gpt.py"] and done.returncode == 0
    assert checkout.run("pretrain_gpt_1t.sh", "--dry-run", STATUS="2").returncode == 2


def test_a_launcher_replaces_torchrun(checkout: Checkout) -> None:
    starter = checkout.root / "start it.sh"
    starter.write_text('echo "started $*"')
    done = checkout.run("pretrain_gpt_1t.sh", LAUNCHER="start it.sh", **RUN)
    assert done.returncode == 0 and "\nstarted python3 pretrain_gpt.py --data-path a --tok" in done.stdout
