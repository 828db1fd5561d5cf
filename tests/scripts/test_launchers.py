"""The launch scripts with a stub for Python; the tests check the commands that they print."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from checkout import RUN, TOKENIZER, commands, value

from megatron.arguments import parse_run_config
from megatron.model.context import ModelContext
from megatron.pretrain_bert import DEFAULTS, build_model

ROOT = Path(__file__).resolve().parents[2]


def test_quickstart_takes_every_step(checkout):
    done = checkout.run("pretrain_gpt.sh", "--train-iters", "7")
    assert done.returncode == 0, done.stderr
    corpus, tokenizer, data, training, *samples = commands(done)
    assert corpus == ["python3", "tools/make_corpus.py", "--output", "quickstart/corpus.jsonl"]
    assert tokenizer[1] == "tools/train_tokenizer.py"
    assert data[1] == "tools/preprocess_data.py" and "--append-eod" in data
    assert training[1] == "pretrain_gpt.py" and training[-2:] == ["--train-iters", "7"]
    assert [sample[1] for sample in samples] == 3 * ["tools/generate_text.py"]
    assert [value(sample, "--prompt") for sample in samples] == ["class", "def", "import"]

    assert value(tokenizer, "--input") == value(data, "--input") == value(corpus, "--output")
    assert value(training, "--data-path") == value(data, "--output-prefix") + "_text_document"
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-type"):
        assert value(training, flag) == value(data, flag)
    assert value(data, "--vocab-file") == value(tokenizer, "--output") + "/vocab.json"
    assert value(training, "--save") == value(training, "--load") == value(samples[0], "--load")
    assert "--bf16" not in training


def test_quickstart_skips_existing_files(checkout):
    out = checkout.root / "quickstart"
    (out / "tokenizer").mkdir(parents=True)
    for name in ("corpus.jsonl", "tokenizer/vocab.json", "corpus_text_document.idx"):
        (out / name).touch()
    done = checkout.run("pretrain_gpt.sh")
    assert [c[1] for c in commands(done)] == ["pretrain_gpt.py", *3 * ["tools/generate_text.py"]]
    assert "quickstart/corpus.jsonl exists" in done.stdout


def test_runs_from_any_folder(checkout, tmp_path):
    done = checkout.run("pretrain_gpt.sh", cwd=tmp_path, QUICKSTART_DIR="mine")
    made = commands(done)
    assert made[0] == [
        "python3",
        f"{checkout.root}/tools/make_corpus.py",
        "--output",
        "mine/corpus.jsonl",
    ]
    assert value(made[3], "--save") == "mine/checkpoints"


def test_own_data_and_checkpoint_folder(checkout):
    done = checkout.run("pretrain_gpt.sh", DATA_PATH="0.3 a 0.7 b", CHECKPOINT_PATH="run 1", **TOKENIZER)
    training, sample, *_ = commands(done)
    at = training.index("--data-path")
    assert training[at + 1 : at + 6] == ["0.3", "a", "0.7", "b", "--tokenizer-type"]
    assert value(training, "--vocab-file") == "v.json" and value(training, "--merge-file") == "m.txt"
    assert value(training, "--save") == value(sample, "--load") == "run 1"
    assert value(training, "--metrics-path") == "run 1/metrics.jsonl"


def test_a_gpu_gets_a_larger_model_in_bf16(checkout):
    training = commands(checkout.run("pretrain_gpt.sh", NO_GPU="0"))[3]
    assert "--bf16" in training and int(value(training, "--hidden-size")) >= 768


def test_several_processes_use_torchrun(checkout):
    env = {
        "GPUS_PER_NODE": "2",
        "NNODES": "3",
        "NODE_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "777",
    }
    done = checkout.run("pretrain_gpt.sh", **env, DATA_PATH="a", **TOKENIZER)
    (training,) = commands(done)  # only the first node samples text
    assert training[1:3] == ["-m", "torch.distributed.run"]
    expected = {"nproc-per-node": "2", "nnodes": "3", "node-rank": "1", "master-addr": "node0"}
    for flag, number in (expected | {"master-port": "777"}).items():
        assert value(training, f"--{flag}") == number
    assert training.index("--master-port") + 2 == training.index("pretrain_gpt.py")


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        (
            "pretrain_gpt.sh",
            {"DATA_PATH": "a", "VOCAB_FILE": "v"},
            "VOCAB_FILE and MERGE_FILE name a tokenizer",
        ),
        ("pretrain_gpt_345m.sh", RUN | {"MERGE_FILE": "m", "VOCAB_FILE": ""}, "set both or"),
        ("pretrain_gpt.sh", TOKENIZER, "VOCAB_FILE and MERGE_FILE need DATA_PATH"),
        ("pretrain_gpt.sh", {"NNODES": "2"}, "several nodes need DATA_PATH"),
        ("pretrain_gpt_345m.sh", {}, "DATA_PATH is not set"),
        ("pretrain_gpt_345m.sh", {"DATA_PATH": "a"} | TOKENIZER, "CHECKPOINT_PATH is not set"),
        ("pretrain_gpt_1t.sh", RUN, "NODE_RANK is not set, but NNODES is 384"),
        ("pretrain_gpt_1t.sh", RUN | {"NODE_RANK": "3"}, "MASTER_ADDR is not set, but NNODES is 384"),
    ],
)
def test_wrong_variables_are_one_line(checkout, script, env, message):
    done = checkout.run(script, **env)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    "script", ["pretrain_gpt.sh", "pretrain_gpt_345m.sh", "pretrain_bert.sh", "pretrain_bert_336m.sh"]
)
def test_data_with_a_recorded_tokenizer_needs_no_files(checkout, script):
    done = checkout.run(script, DATA_PATH="0.3 a 0.7 b", CHECKPOINT_PATH="run")
    assert done.returncode == 0, done.stderr
    training = commands(done)[0]
    assert training[training.index("--data-path") :][1:5] == ["0.3", "a", "0.7", "b"]
    assert not {"--tokenizer-type", "--vocab-file", "--merge-file"} & set(training)


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_exit_status_is_that_of_training(checkout, status):
    done = checkout.run("pretrain_gpt.sh", STATUS=str(status))
    assert done.returncode == status
    assert ("Done." in done.stdout) == (status == 0)
    assert "Run the same command to resume" not in done.stdout


@pytest.mark.parametrize(("signal", "status"), [("INT", 130), ("TERM", 143)])
def test_interruption(checkout, signal, status):
    # torchrun also exits with 1 when a signal stops it.
    env = RUN | {"GPUS_PER_NODE": "2"}
    done = checkout.run("pretrain_gpt.sh", SIGNAL=signal, STATUS="1", **env)
    assert done.returncode == status
    assert "Done." not in done.stdout
    assert "Run the same command to resume" in done.stdout


@pytest.mark.parametrize("launcher", ["", "launcher"])
@pytest.mark.parametrize("signal", ["INT", "TERM"])
@pytest.mark.parametrize(("status", "resumes"), [(0, False), (1, False), (200, True)])
def test_a_programs_own_status_stays_after_a_signal(checkout, launcher, signal, status, resumes):
    """A full disk while it saves gives 1, and no restart."""
    (checkout.root / "launcher").write_text('exec "$@"')
    env = RUN | {"LAUNCHER": launcher, "SIGNAL": signal, "STATUS": str(status)}
    done = checkout.run("pretrain_gpt_345m.sh", **env)
    assert done.returncode == status
    assert ("Run the same command to resume" in done.stdout) == resumes


def test_sigterm_to_the_script_alone_is_forwarded(checkout):
    done = checkout.run("pretrain_gpt.sh", SIGNAL="TERM", LONG="1")
    assert done.returncode == 143
    assert "passed on" in done.stdout and "Run the same command to resume" in done.stdout


def test_without_torch_everything_is_installed(checkout):
    done = checkout.run("pretrain_gpt.sh", NO_TORCH="1")
    venv, install, corpus = commands(done)[:3]
    assert venv == ["python3", "-m", "venv", ".venv"]
    assert install == [
        ".venv/bin/python",
        "-m",
        "pip",
        "install",
        "-c",
        "constraints.txt",
        "-r",
        "requirements.txt",
    ]
    assert corpus[0] == ".venv/bin/python"


def test_with_torch_only_missing_packages_are_installed(checkout):
    missing = 'tqdm==1.2; python_version >= "3.11"\ntiktoken==0.1'
    done = checkout.run("pretrain_gpt.sh", MISSING=missing)
    venv, install, corpus = commands(done)[:3]
    assert venv == ["python3", "-m", "venv", ".venv"]
    assert install == [
        ".venv/bin/python",
        "-m",
        "pip",
        "install",
        "-c",
        "constraints.txt",
        *missing.split("\n"),
    ]
    assert corpus[0] == ".venv/bin/python"
    # The environment inherits the packages, torch among them, of the Python that created it.
    assert (checkout.root / ".venv/packages/inherited.pth").read_text() == "/elsewhere/site-packages\n"


def test_the_test_script_passes_arguments_to_pytest(checkout):
    (command,) = commands(checkout.run("test.sh", "-m", "slow", "tests/a b"))
    assert command[:3] == ["python3", "-m", "pytest"] and command[-3:] == ["-m", "slow", "tests/a b"]


def test_345m_has_the_published_settings(checkout):
    (training,) = commands(checkout.run("pretrain_gpt_345m.sh", "--lr", "1", **RUN))
    published = (
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 "
        "--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1e-5 "
        "--weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 100 "
        "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --split 949,50,1"
    )
    for flag, number in re.findall(r"(--\S+) (\S+)", published):
        assert value(training, flag) == number
    assert training[-2:] == ["--lr", "1"]


def test_bert_quickstart(checkout):
    done = checkout.run("pretrain_bert.sh", "--train-iters", "7")
    assert done.returncode == 0, done.stderr
    corpus, tokenizer, data, training = commands(done)
    assert value(tokenizer, "--type") == "wordpiece" and "--split-sentences" in data
    assert training[1] == "pretrain_bert.py" and training[-2:] == ["--train-iters", "7"]
    assert value(tokenizer, "--input") == value(data, "--input") == value(corpus, "--output")
    assert value(training, "--data-path") == value(data, "--output-prefix") + "_text_sentence"
    assert value(training, "--vocab-file") == value(data, "--vocab-file")
    assert value(data, "--vocab-file") == value(tokenizer, "--output") + "/vocab.txt"
    done = checkout.run(
        "pretrain_bert.sh", DATA_PATH="0.3 a 0.7 b", VOCAB_FILE="v.txt", CHECKPOINT_PATH="run 1"
    )
    (training,) = commands(done)
    assert training[training.index("--data-path") :][1:5] == ["0.3", "a", "0.7", "b"]


@pytest.mark.parametrize(
    ("size", "parameters", "tensor"), [("336m", 0.336e9, 1), ("1.3b", 1.3e9, 2), ("3.9b", 3.9e9, 4)]
)
def test_bert_sizes_match_the_paper(checkout, size: str, parameters: float, tensor: int) -> None:
    env = {"DATA_PATH": "a", "VOCAB_FILE": "v.txt", "CHECKPOINT_PATH": "run"}
    (training,) = commands(checkout.run(f"pretrain_bert_{size}.sh", "--lr", "1", **env))
    words = training[training.index("pretrain_bert.py") + 1 :]
    config = parse_run_config(words, description="", defaults=DEFAULTS)
    assert config.optimizer.lr == 1 and config.training.global_batch_size == 1024
    assert config.parallel.tensor_model_parallel_size == tensor
    (dry,) = commands(checkout.run(f"pretrain_bert_{size}.sh", "--dry-run"))
    assert "--mock-data" in dry and dry[-2:] == ["--world-size", str(tensor)]
    context = ModelContext(vocab_size=30524, padded_vocab_size=30524)
    with torch.device("meta"):
        model = build_model(config, context, None)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "scripts").glob("[pt]*.sh")))
def test_help_is_the_opening_comment(checkout, script):
    done = checkout.run(script, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert f"bash scripts/{script} [" in done.stdout
    assert "#" not in done.stdout and "set -e" not in done.stdout


@pytest.mark.parametrize("script", ["scripts/test.sh", ".ci/run"])
def test_help_of_a_script_in_its_own_folder(script):
    path = ROOT / script
    done = subprocess.run(["bash", path.name, "-h"], cwd=path.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(("Run the tests.", "Checks for every change"))


@pytest.mark.parametrize("script", ["common.sh", "slurm/pretrain.sh"])
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:1"}, "a:1"),
    ],
)
def test_the_allocator_is_set_unless_the_user_did(checkout, script: str, env: dict, expected: str) -> None:
    text = (checkout.root / "scripts" / script).read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("export PYTORCH_ALLOC_CONF="))
    done = subprocess.run(
        ["bash", "-euc", f"{line}\nprintenv PYTORCH_ALLOC_CONF"],
        env={"PATH": os.environ["PATH"]} | env,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{expected}\n"
