"""Data by phase: the syntax, the order of the samples, and runs that stop, resume and are extended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.training import loop
from megatron.variants.blend_flags import DataPhase, check_phases, data_prefixes, phases_after, split_phases
from megatron.variants.data_phases import PhaseOrder, phased_order

TINY = """
    --device cpu --tokenizer-type NullTokenizer --vocab-size 900 --num-workers 0 --num-layers 1 --hidden-size 8
    --num-attention-heads 1 --seq-length 8 --lr 1e-2 --eval-iters 0 --split 1,0,0 --lr-decay-style constant
    --train-samples 48 --log-interval 1
""".split()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Three token files with 49 samples of 8 tokens in an epoch; their tokens are 0-299, 300-599 and 600-899."""
    rng = np.random.default_rng(1)
    for i, name in enumerate("abc"):
        with IndexedDatasetWriter(str(tmp_path / name), np.uint16) as writer:
            for _ in range(40):
                writer.add_document([rng.integers(300 * i, 300 * i + 300, size=10).astype(np.uint16)])
    return {name: str(tmp_path / name) for name in "abc"}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The samples that runs train on, as their input tokens, in the order of the steps."""
    samples: list[list[int]] = []
    step = loop.Engine.train_step

    def train_step(engine: Any, batches: Any, **named: Any) -> Any:
        taken = [next(batches) for _ in range(named["num_microbatches"])]
        samples.extend(row for batch in taken for row in batch.tokens.tolist())
        return step(engine, iter(taken), **named)

    monkeypatch.setattr(loop.Engine, "train_step", train_step)
    return samples


def file_of(sample: list[int]) -> str:
    return "abc"[sample[0] // 300]


def test_parse() -> None:
    words = ["0.7", "a", "0.3", "b", "from=1000", "c", "from=1500", "1", "a", "2", "c"]
    phases = split_phases(words, "--data-path")
    assert phases == [
        DataPhase(0, ("0.7", "a", "0.3", "b")),
        DataPhase(1000, ("c",)),
        DataPhase(1500, ("1", "a", "2", "c")),
    ]
    assert data_prefixes(words, "--data-path") == ["a", "b", "c"]
    assert phases_after(words, "--data-path", 999) == [
        "0.7",
        "a",
        "0.3",
        "b",
        "from=1",
        "c",
        "from=501",
        *words[7:],
    ]
    assert phases_after(words, "--data-path", 1000) == ["c", "from=500", *words[7:]]
    assert phases_after(words, "--data-path", 1501) == words[7:]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data_path": "a from=0 b"}, "--data-path: from=0 must be from=SAMPLES with a number of .* above 0"),
        ({"data_path": "a from=9 b from=9 a"}, "from=9 must be from=SAMPLES with a number .* above 9"),
        ({"data_path": "a from=1e6 b"}, "from=1e6 must be from=SAMPLES"),
        ({"data_path": "a from= b"}, "from= must be from=SAMPLES"),
        (
            {"data_path": "from=9 b"},
            "no data from the start of the run to from=9; give the blend before from=9",
        ),
        ({"data_path": "a from=8 from=9 b"}, "no data from from=8 to from=9"),
        ({"train_data_path": "a from=8"}, "--train-data-path: no data after from=8"),
        (
            {"valid_data_path": "a from=8 b"},
            "--valid-data-path: from=8 begins a phase of the training data; give one",
        ),
        ({"data_path": "a from=8 1 b 1 b"}, "b is given twice in a phase; add up its weights"),
        ({"data_path": "a from=8 1 b 0 c"}, "--data-path: the phase from=8: the weight of c is 0"),
        (
            {"data_path": "1 a 2 from=8 b"},
            "--data-path: the first phase: 3 values; weights and prefixes come in",
        ),
        ({"data_path": "a From=8 b"}, "--data-path: From=8 begins no phase; write from=8"),
        ({"data_path": "a from=8 b", "dataloader_type": "cyclic"}, "from=8 needs --dataloader-type single"),
        ({"data_path": "a from=8 b c", "data_order": "head"}, "a phase needs weights"),
    ],
)
def test_errors(flags: dict[str, str], message: str) -> None:
    lists = {name: tuple(v.split()) if name.endswith("path") else v for name, v in flags.items()}
    with pytest.raises(InputError, match=message):
        check_phases(DataConfig(seq_length=8, **lists))


def test_errors_come_before_the_run(pretrain: Callable[..., str], files: dict[str, str]) -> None:
    with pytest.raises(InputError, match="--train-epochs: 2 has no meaning with phases in --data-path"):
        pretrain(
            *[flag for flag in TINY if flag not in ("--train-samples", "48")],
            *["--data-path", files["a"], "from=9", files["b"], "--train-epochs", 2, "--micro-batch-size", 4],
        )


def test_the_order_equals_one_made_sample_by_sample() -> None:
    """Within a phase by Megatron-LM's rule for blends; each file is read on over the phases."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        number, size = rng.integers(1, 6), int(rng.integers(1, 400))
        starts = [0, *sorted(rng.choice(np.arange(1, 400), 3, replace=False).tolist())]
        phases = []
        for start in [s for s in starts if s < size]:
            members = rng.permutation(number)[: rng.integers(1, number + 1)].tolist()
            weights = rng.integers(1, 5, len(members))
            phases.append(PhaseOrder(start, members, (weights / weights.sum()).tolist()))
        expected, read = [], np.zeros(number, dtype=int)
        for i in range(size):
            phase = next(p for p in reversed(phases) if p.start <= i)
            if i == phase.start:
                counts = np.zeros(len(phase.files))
            chosen = int(np.argmax(phase.shares / np.sum(phase.shares) * max(i - phase.start, 1.0) - counts))
            counts[chosen] += 1
            file = phase.files[chosen]
            expected.append((file, read[file]))
            read[file] += 1
        datasets, samples = phased_order(phases, size)
        assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == expected


def test_a_file_is_read_on_in_the_next_phase(files: dict[str, str]) -> None:
    """No sample of an epoch occurs twice, though `a` is in all phases."""
    a, b, c = files.values()
    words = (a, "from=10", "1", a, "3", b, "from=30", "0.5", c, "0.5", a)
    config = DataConfig(seq_length=8, data_path=words, split="1,0,0")
    data = build_gpt_datasets(config, samples=(60, 0, 0), seed=1, vocab_size=900)["train"]
    texts = [data[i]["text"].tolist() for i in range(len(data))]
    assert len(texts) == 60 == len({tuple(text) for text in texts})
    names = "".join(map(file_of, texts))
    assert names[:10] == "a" * 10
    assert [names[10:30].count(name) for name in "abc"] == [5, 15, 0]
    assert [names[30:].count(name) for name in "abc"] == [15, 0, 15]
    # 30 samples of `a` in the order of a run that reads nothing else.
    alone = DataConfig(seq_length=8, data_path=(a,), split="1,0,0")
    whole = build_gpt_datasets(alone, samples=(30, 0, 0), seed=1, vocab_size=900)["train"]
    assert [t for t in texts if file_of(t) == "a"] == [whole[i]["text"].tolist() for i in range(30)]


def test_validation_keeps_the_blend_of_the_first_phase(files: dict[str, str]) -> None:
    a, b, c = files.values()

    def validation(*words: str) -> list[list[int]]:
        config = DataConfig(seq_length=8, data_path=words, split="50,50,0")
        data = build_gpt_datasets(config, samples=(20, 30, 0), seed=1, vocab_size=900)["validation"]
        return [data[i]["text"].tolist() for i in range(30)]

    assert validation("1", a, "1", b, "from=10", c) == validation("1", a, "1", b)


def test_stopped_and_resumed_at_every_sample_count(
    pretrain: Callable[..., str], files: dict[str, str], tmp_path: Path, read: list[list[int]]
) -> None:
    """The run stops before, at and after each border, and resumes with other batch sizes, across the borders."""
    a, b, c = files.values()
    data = ["--data-path", "3", a, "1", b, "from=14", "0.5", b, "0.5", c, "from=32", c, "--seed", 5]
    out = pretrain(*TINY, *data, "--micro-batch-size", 4)
    whole = list(read)
    assert len(whole) == 48 and set(map(file_of, whole[:14])) == set("ab")
    assert set(map(file_of, whole[14:32])) == set("bc") and set(map(file_of, whole[32:])) == {"c"}
    assert f"data phase 2: samples 15 to 32: 0.5 {b} 0.5 {c}" in out
    assert f"data phase 2 from sample 15 on, in iteration 4: 0.5 {b} 0.5 {c}" in out
    assert f"data phase 3 from sample 33 on, in iteration 9: {c}" in out

    read.clear()
    run = [*TINY, *data, "--save", tmp_path / "run", "--load", tmp_path / "run"]
    pretrain(*run, "--micro-batch-size", 4, "--exit-interval", 3)  # at 12 samples
    pretrain(*run, "--micro-batch-size", 2, "--exit-interval", 4)  # at 14: iteration 3 to 4
    pretrain(*run, "--micro-batch-size", 3, "--global-batch-size", 6, "--exit-interval", 7)  # at 32
    pretrain(*run, "--micro-batch-size", 1, "--global-batch-size", 2, "--exit-interval", 9)  # at 36
    pretrain(*run, "--micro-batch-size", 4)
    assert read == whole
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    phases = {row["consumed samples"]: row["data phase"] for row in rows if "data phase" in row}
    assert phases[12] == 1 and phases[14] == 1 and phases[20] == 2 and phases[32] == 2 and phases[34] == 3


def test_a_finished_run_goes_on_with_another_phase(
    pretrain: Callable[..., str], files: dict[str, str], tmp_path: Path, read: list[list[int]]
) -> None:
    a, b, c = files.values()
    run = [*TINY, "--save", tmp_path / "run", "--load", tmp_path / "run", "--micro-batch-size", 4]
    pretrain(*run, "--data-path", a)
    words = ["--data-path", a, "from=48", "1", a, "1", b, "from=100", c, "--train-samples", 120]
    out = pretrain(*run, *words, "--exit-interval", 20)
    pretrain(*run, *words)
    names = "".join(map(file_of, read))
    assert names[:48] == "a" * 48
    assert len(names) == 120 and sorted(names[48:100]) == ["a"] * 26 + ["b"] * 26 and names[100:] == "c" * 20
    assert "the order of the training data may change from here on: --data-path changed" in out
    assert "data phase 3: samples 101 to 120" in out
    # 48 samples of a file of 400 tokens, and 26 more in the second phase.
    assert f"1.48 epochs of {a}, 400 tokens" in out and f"0.52 epochs of {b}, 400 tokens" in out


def test_a_phase_after_the_end_is_not_reached(pretrain: Callable[..., str], files: dict[str, str]) -> None:
    data = ["--train-data-path", files["a"], "from=48", files["b"]]
    out = pretrain(*[f for f in TINY if f not in ("--split", "1,0,0")], *data, "--micro-batch-size", 4)
    assert f"data phase 2: not reached in 48 samples: {files['b']}" in out


@pytest.mark.slow
def test_layouts_change_across_a_border(
    command: Callable[..., Any], files: dict[str, str], tmp_path: Path
) -> None:
    """Losses of a run that goes on in other layouts of real processes equal those of one process."""
    a, b, _ = files.values()
    run = ["pretrain_gpt.py", *TINY, "--data-path", a, "from=14", "1", a, "3", b, "--global-batch-size", 4]
    # Two heads, which tensor parallelism can divide.
    run[run.index("--num-attention-heads") + 1] = "2"
    run += ["--attention-dropout", "0", "--hidden-dropout", "0", "--micro-batch-size"]
    command(*run, 4, "--metrics-path", tmp_path / "whole.jsonl")
    parts = [*run, 1, "--save", tmp_path / "run", "--load", tmp_path / "run"]
    command(*parts, "--exit-interval", 3, replicas=2)  # at 12 samples
    command(*parts, "--exit-interval", 4, "--tensor-model-parallel-size", 2, replicas=2)  # at 16
    command(*parts)

    def losses(path: Path) -> dict[int, tuple[float, int]]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {row["iteration"]: (row["lm loss"], row["data phase"]) for row in rows if "lm loss" in row}

    whole, changed = losses(tmp_path / "whole.jsonl"), losses(tmp_path / "run" / "metrics.jsonl")
    assert list(whole) == list(changed) == list(range(1, 13))
    for iteration, (loss, phase) in whole.items():
        assert changed[iteration] == (pytest.approx(loss, abs=1e-5), phase)
        assert phase == (1 if iteration < 4 else 2)
