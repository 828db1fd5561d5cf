"""--sample-interval: samples during training, in any layout and without an effect on training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of

from megatron.arguments import parse_run_config
from megatron.commands import generate_text
from megatron.errors import InputError
from megatron.inference.in_training import SampleTexts, make_predictor
from megatron.inference.predictor import NonFiniteLogits, Predictor
from megatron.parallel.mesh import Mesh
from megatron.plugins import run
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT
from megatron.training.loop import Trainer

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-workers 0 --ops-backend plain
    --num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 20 --micro-batch-size 2 --lr 1e-2
    --global-batch-size 4 --train-iters 4 --eval-iters 0 --log-interval 1 --init-method-std 0.2
    --hidden-dropout 0.1 --attention-dropout 0.1
""".split()
PROMPTS = ["1 2 3", "40"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    return path


def rows_of(path: Path) -> tuple[list[float], dict[tuple[int, str], str]]:
    """Losses, and texts by iteration and tag."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = {(row["iteration"], tag): text for row in rows for tag, text in row.get("text", {}).items()}
    return [row["lm loss"] for row in rows if "lm loss" in row], texts


def test_samples_do_not_change_training(pretrain, prompts: Path, tmp_path: Path) -> None:
    metrics = [tmp_path / "without.jsonl", tmp_path / "with.jsonl"]
    pretrain(*TINY, "--metrics-path", metrics[0])
    sampling = ["--sample-interval", 2, "--sample-prompts", prompts]
    outputs = ["--tensorboard-dir", tmp_path / "events", "--save", tmp_path / "run", "--save-interval", 2]
    out = pretrain(*TINY, "--metrics-path", metrics[1], *sampling, *outputs, "--timing-log-level", 1)
    (without, none), (losses, texts) = map(rows_of, metrics)
    assert losses == without and len(losses) == 4 and none == {}
    assert list(texts) == [(i, f"sample {number}") for i in (2, 4) for number in (1, 2)]
    assert texts[2, "sample 1"] != texts[4, "sample 1"]
    for number, prompt in enumerate(PROMPTS, 1):
        text = texts[2, f"sample {number}"].removeprefix(prompt)
        assert f' sample {number} at iteration 2 | "{prompt}" | "{text}"\n' in out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    tensors = events.Tensors("sample 2/text_summary")
    shown = [(t.step, t.tensor_proto.string_val[0].decode().strip()) for t in tensors]
    assert shown == [(i, texts[i, "sample 2"]) for i in (2, 4)]


def test_samples_equal_those_of_the_checkpoint(pretrain, prompts: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    pretrain(*TINY, "--sample-interval", 4, "--sample-prompts", prompts, "--save", save)
    words = f"--load {save} --device cpu --sample-input-file {prompts} --out-seq-length 64 --temperature 0.8"
    output = tmp_path / "texts.jsonl"
    generate_text.main([*words.split(), "--top-p", "0.95", "--sample-output-file", str(output)])
    _, texts = rows_of(save / "metrics.jsonl")
    standalone = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] + row["text"] for row in standalone] == list(texts.values())


def train(words: list[str]) -> None:
    """Train on this rank; samples must come from weights that are not being gathered."""
    sample = SampleTexts._sample

    def checked(self: SampleTexts, trainer: Trainer) -> None:
        assert not trainer.engine.buffer.gather.pending
        sample(self, trainer)

    SampleTexts._sample = checked
    assert run(parse_run_config(words, description="", defaults={}), GPT) == 0


ALIBI = "--position-embedding-type alibi --ops-backend plain"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
DROPPING = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-expert-capacity-factor 1 "
    "--position-embedding-type rope"
)


@pytest.mark.parametrize(
    ("processes", "model", "layout"),
    [
        (
            4,
            "",
            "--tensor-model-parallel-size 2 --sequence-parallel --recompute-activations --micro-batch-size 1 "
            "--use-distributed-optimizer --overlap-param-gather",
        ),
        pytest.param(
            4,
            "",
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1 "
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            marks=pytest.mark.slow,
        ),
        (2, "", "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather"),
        (1, MTP, ""),
        (2, MTP, "--pipeline-model-parallel-size 2"),
        pytest.param(
            2,
            f"{MTP} --untie-embeddings-and-output-weights",
            "--pipeline-model-parallel-size 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ALIBI, "--context-parallel-size 2", marks=pytest.mark.slow),
        (2, DROPPING, "--context-parallel-size 2"),
        (4, "--position-embedding-type rope", "--context-parallel-size 2 --pipeline-model-parallel-size 2"),
    ],
    ids=[
        "tensor and sequence with replicas",
        "interleaved stages with replicas",
        "sharded parameters",
        "multi-token prediction",
        "multi-token prediction in stages",
        "multi-token prediction in stages, untied",
        "context with ALiBi",
        "context with dropped tokens",
        "context and stages",
    ],
)
def test_layouts_sample_the_same_texts(
    pretrain, prompts: Path, tmp_path: Path, processes: int, model: str, layout: str
) -> None:
    words = [*TINY, "--hidden-dropout", "0", "--attention-dropout", "0", *model.split()]
    words += ["--sample-interval", "2", "--sample-prompts", str(prompts), "--metrics-path"]
    metrics = [tmp_path / "one.jsonl", tmp_path / "several.jsonl"]
    pretrain(*words, metrics[0])
    run_distributed(train, processes, [*words, str(metrics[1]), *layout.split()])
    (_, expected), (_, found) = map(rows_of, metrics)
    assert len(expected) == 4 and found == expected


def test_the_router_has_its_bias_in_fp32() -> None:
    """It decides between close scores, and bf16 rounds 1.001 to 1."""
    model = "--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid"
    config = config_of(f"{model} --moe-router-enable-expert-bias --bf16")
    engine = engine_of(Mesh(device=CPU), config)
    (chunk,) = make_predictor(engine).stages.chunks
    for bucket, values in zip(engine.buffer.buckets, engine.buffer.masters, strict=True):
        if bucket.group.optimizer.counts:
            values.fill_(1.001)
    biases = [p for name, p in chunk.named_parameters() if name.endswith("router.expert_bias")]
    assert len(biases) == 4 and all(torch.equal(p, torch.full((4,), 1.001)) for p in biases)


def test_a_failed_sample_does_not_end_the_run(
    pretrain, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NonFiniteLogits

    monkeypatch.setattr(Predictor, "forward", fail)
    out = pretrain(*TINY, "--sample-interval", 2, "--sample-prompts", prompts)
    assert "warning: no samples at iteration 2: " in out and "  4/4  loss " in out


def test_resumed_run_keeps_its_samples(pretrain, prompts: Path, tmp_path: Path) -> None:
    """Also where an evaluation was due when the run stopped, whose values are dropped and made again."""
    flags = [
        *TINY,
        "--eval-iters",
        1,
        "--eval-interval",
        2,
        "--sample-interval",
        2,
        "--sample-prompts",
        prompts,
    ]
    save = ["--save", tmp_path / "run", "--load", tmp_path / "run"]
    pretrain(*flags, *save, "--exit-interval", 2)
    pretrain(*flags, *save)
    _, texts = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert list(texts) == [(i, f"sample {number}") for i in (2, 4) for number in (1, 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"--sample-prompts: .*prompts.txt cannot be read \(No such file or directory\)"),
        ("\n \n", "--sample-prompts: .*prompts.txt is empty"),
        ("1\nword\n", "line 2: 'word' is not a token id"),
        (" ".join(["1"] * 20), "line 1: the prompt has 20 tokens and leaves no room in the context of 20"),
    ],
)
def test_invalid_prompts(pretrain, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        pretrain(*TINY, "--sample-interval", 2, "--sample-prompts", path)


def test_flags_need_each_other(pretrain, prompts: Path) -> None:
    with pytest.raises(InputError, match="--sample-interval needs --sample-prompts"):
        pretrain(*TINY, "--sample-interval", 2)
    with pytest.raises(InputError, match="--sample-prompts needs --sample-interval"):
        pretrain(*TINY, "--sample-prompts", prompts)


def test_bert_is_rejected(prompts: Path) -> None:
    words = [*TINY, "--sample-interval", "2", "--sample-prompts", str(prompts)]
    config = parse_run_config(words, description="", defaults={})
    with pytest.raises(InputError, match="--sample-interval needs a GPT, and this run trains BERT"):
        run(config, bert(binary_head=True))
