"""Zero-shot tasks, against NVIDIA's own evaluation, the logits of transformers, and lm_eval."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_distributed
from hf_models import save_hf
from torch import Tensor

from megatron.commands import convert_checkpoint, evaluate
from megatron.evaluation import zero_shot
from megatron.evaluation.wikitext import detokenize
from megatron.inference.config import InferenceConfig
from megatron.inference.load import build_gpt, find_any_checkpoint
from megatron.inference.stages import Stages
from megatron.parallel.mesh import ALONE, Mesh
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.gpt2 import GPT2BPETokenizer

LENGTH = 32  # context length of the models made here


def tokenizer_flags(shared: Path) -> list[str]:
    files = [str(shared / "data" / f"gpt2-tiny-{name}") for name in ("vocab.json", "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files[0], "--merge-file", files[1]]


def run(*words: object) -> None:
    """Run tools/evaluate.py, which must leave no transfer unfinished."""
    made: list[Stages] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "Stages", lambda *arguments: made.append(Stages(*arguments)) or made[-1])
        evaluate.main([str(word) for word in words])
    assert len(made) == 1 and not made[0].transfers.sending


def result_of(folder: Path, *words: object) -> dict[str, Any]:
    """Run tools/evaluate.py and return the result that it writes."""
    run(*words, "--output-path", folder / "result.json", "--device", "cpu")
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def native(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model of NVIDIA's evaluation as a native checkpoint, which includes the tokenizer."""
    folder = tmp_path_factory.mktemp("native") / "run"
    words = ["--from", "megatron", "--to", "native", "--save", str(folder), *tokenizer_flags(shared)]
    convert_checkpoint.main([*words, "--load", str(shared / "vectors" / "eval-v2.5" / "after200_tp1")])
    return folder


# From the README of the vectors, with all digits that NVIDIA's evaluation printed.
WIKITEXT = (
    " validation results on WIKITEXT103 | avg loss: 6.7403E+00 | ppl: 8.4583E+02 | adjusted ppl: 1.8280E+04 | "
    "token ratio: 1.455947625388371 |"
)
LAMBADA = (
    " validation results on LAMBADA | number correct: 2.0000E+00 | total examples: 4.0000E+02 | "
    "avg accuracy: 5.0000E-03"
)


def tasks(shared: Path) -> dict[str, list[object]]:
    vectors = shared / "vectors" / "eval-v2.5"
    wiki = [
        "--valid-data",
        vectors / "wiki300.test.tokens",
        "--overlapping-eval",
        64,
        "--micro-batch-size",
        12,
    ]
    return {
        "WIKITEXT103": ["--task", "WIKITEXT103", *wiki],
        "LAMBADA": ["--task", "LAMBADA", "--valid-data", vectors / "lambada400.jsonl"],
    }


def test_equals_nvidia_metrics(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From NVIDIA's own checkpoint, with the softmax it was trained with, over 120 rows of padding too."""
    load = ["--load", shared / "vectors" / "eval-v2.5" / "after200_tp1", *tokenizer_flags(shared)]
    words = tasks(shared)
    result = result_of(tmp_path, *load, *words["WIKITEXT103"])
    assert capsys.readouterr().out.splitlines()[1] == WIKITEXT
    assert result["scored tokens"] == 26242 and result["iteration"] == 200
    run(*load, *words["LAMBADA"])
    assert capsys.readouterr().out.splitlines()[1] == LAMBADA
    result = result_of(tmp_path, *load, *words["LAMBADA"], "--strict-lambada")
    assert (result["results"]["number correct"], result["samples"]) == (0, 400)
    assert result["scored tokens"] > 400


# All axes at once, and an argmax over vocabulary shards.
LAYOUTS = [("WIKITEXT103", 2, 2, 2, ""), ("LAMBADA", 2, 1, 2, ""), ("LAMBADA", 1, 1, 1, "p2p")]
SLOW_LAYOUTS = [
    (task, *sizes)
    for task in ("WIKITEXT103", "LAMBADA")
    for sizes in ((2, 1, 1, ""), (1, 2, 1, ""), (1, 1, 2, ""), (1, 2, 1, "all_gather"), (1, 1, 2, "a2a"))
]


@pytest.mark.parametrize(
    ("task", "tp", "pp", "dp", "cp_comm_type"),
    LAYOUTS + [pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW_LAYOUTS],
)
def test_layouts_equal_nvidia_metrics(
    task: str, tp: int, pp: int, dp: int, cp_comm_type: str, shared: Path, native: Path, tmp_path: Path
) -> None:
    """Tensor-parallel layouts load NVIDIA's checkpoint, others the native one."""
    load: list[object] = ["--load", native]
    if tp > 1:
        load = ["--load", shared / "vectors" / "eval-v2.5" / "after200_tp1", *tokenizer_flags(shared)]
    load += ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp, "--device", "cpu"]
    cp = 2 if cp_comm_type else 1
    if cp_comm_type:
        load += ["--context-parallel-size", cp, "--cp-comm-type", cp_comm_type]
    output = tmp_path / "result.json"
    run_distributed(run, tp * pp * dp * cp, *load, *tasks(shared)[task], "--output-path", output)
    found = json.loads(output.read_text())
    assert found["computed"]["processes"] == tp * pp * dp * cp
    if task == "LAMBADA":
        assert found["results"] == {"number correct": 2, "total examples": 400, "avg accuracy": 0.005}
    else:
        metrics = [found["results"][name] for name in ("avg loss", "ppl", "adjusted ppl")]
        assert [f"{x:.4E}" for x in metrics] == ["6.7403E+00", "8.4583E+02", "1.8280E+04"]


class HFReference:
    """A small GPT-2 of transformers with random weights: its folder, which can be loaded here, and its logits."""

    def __init__(self, folder: Path, shared: Path) -> None:
        import transformers

        self.folder = save_hf(folder, "gpt2", vocab_size=5000)
        self.model = transformers.GPT2LMHeadModel.from_pretrained(self.folder).eval()
        data = shared / "data"
        self.tokenizer = GPT2BPETokenizer(data / "gpt2-tiny-vocab.json", data / "gpt2-tiny-merges.txt")

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [s, v] in fp64."""
        return self.model(torch.tensor([tokens])).logits[0].double()


@pytest.fixture(scope="module")
def theirs(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> HFReference:
    pytest.importorskip("transformers")
    return HFReference(tmp_path_factory.mktemp("hf"), shared)


@pytest.fixture(scope="module")
def text(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "wiki.test.tokens"
    path.write_text((shared / "data" / "wt2-test.txt").read_text(encoding="utf-8")[:4000].strip())
    return path


def expected_loss(theirs: HFReference, tokens: list[int], overlap: int) -> float:
    """Sum over the windows of NVIDIA's dataset, padded and masked."""
    total, targets = 0.0, len(tokens) - 1
    for i in range(max(math.ceil(max(targets - overlap, 0) / overlap) + 1, 1)):
        window = tokens[i * overlap : i * overlap + LENGTH + 1]
        mask = np.zeros(LENGTH)
        mask[: len(window) - 1] = 1
        if overlap != LENGTH and i > 0:
            mask[: LENGTH - overlap] = 0
        window += [4999] * (LENGTH + 1 - len(window))
        logprobs = theirs.logits(window[:-1]).log_softmax(-1)
        total -= sum(mask[k] * float(logprobs[k, window[k + 1]]) for k in range(LENGTH))
    return total


@pytest.mark.parametrize("overlap", [None, 8, LENGTH])
def test_wikitext_equals_transformers(
    overlap: int | None, theirs: HFReference, text: Path, shared: Path, tmp_path: Path
) -> None:
    load = ["--load", theirs.folder, *tokenizer_flags(shared), "--task", "WIKITEXT103", "--valid-data", text]
    more = [] if overlap is None else ["--overlapping-eval", overlap]
    found = result_of(tmp_path, *load, *more)
    tokens = theirs.tokenizer.tokenize(detokenize(text.read_text()))
    mean = expected_loss(theirs, tokens, overlap or 32) / (len(tokens) - 1)
    ratio = (len(tokens) - 1) / (len(text.read_text().strip().split(" ")) - 1)
    assert found["results"] == pytest.approx(
        {
            "avg loss": mean,
            "ppl": math.exp(min(mean, 20)),
            "adjusted ppl": math.exp(min(mean * ratio, 20)),
            "token ratio": ratio,
        },
        rel=1e-4,
    )
    assert found["scored tokens"] == len(tokens) - 1
    assert found["computed"]["overlapping_eval"] == (overlap or 32)


def test_ppl_equals_transformers(theirs: HFReference, text: Path, shared: Path, tmp_path: Path) -> None:
    """Windows slide by 5, and each token is predicted from all tokens before it in its window."""
    load = ["--load", theirs.folder, *tokenizer_flags(shared), "--task", "PPL", "--valid-data", text]
    found = result_of(tmp_path, *load, "--overlapping-eval", 5)
    stream = [4999, *theirs.tokenizer.tokenize(text.read_text())]
    loss, done = 0.0, 0
    while done < len(stream) - 1:
        end = min(done + (LENGTH if done == 0 else 5), len(stream) - 1)
        begin = max(0, end - LENGTH)
        logprobs = theirs.logits(stream[begin:end]).log_softmax(-1)
        loss -= sum(float(logprobs[k - 1 - begin, stream[k]]) for k in range(done + 1, end + 1))
        done = end
    mean = loss / (len(stream) - 1)
    assert found["results"]["avg loss"] == pytest.approx(mean, rel=1e-4)
    assert found["results"]["ppl"] == pytest.approx(math.exp(mean), rel=1e-3)
    assert math.log(found["results"]["word ppl"]) == pytest.approx(
        loss / len(text.read_text().split()), rel=1e-4
    )
    bits = loss / math.log(2) / len(text.read_bytes())
    assert found["results"]["bits per byte"] == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_lambada_equals_transformers(strict: bool, theirs: HFReference, shared: Path, tmp_path: Path) -> None:
    """Random weights predict no last word of real texts, so every second text ends in the predicted word."""
    lines = (shared / "data" / "lambada_2000.jsonl").read_text().splitlines()[:30]
    texts = [json.loads(line)["text"] for line in lines]
    expected = 0
    tokenize = theirs.tokenizer.tokenize
    for i, text in enumerate(texts):
        before = " ".join(text.split()[:-1])
        if i % 2:
            predicted = int(theirs.logits(tokenize(before)[-LENGTH:])[-1].argmax())
            text = texts[i] = f"{before} {theirs.tokenizer.detokenize([predicted]).strip()}"
        if strict:
            context, target = (
                tokenize(text[: text.rfind(text.split()[-1])].strip()),
                tokenize(f" {text.split()[-1]}"),
            )
        else:
            context, target = tokenize(text)[:-1], tokenize(text)[-1:]
        seen = [*context, *target][-LENGTH - 1 : -1]
        predicted = theirs.logits(seen)[-len(target) :].argmax(-1)
        expected += predicted.tolist() == target
    path = tmp_path / "lambada.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    load = ["--load", theirs.folder, *tokenizer_flags(shared), "--task", "LAMBADA", "--valid-data", path]
    found = result_of(tmp_path, *load, *(["--strict-lambada"] if strict else []))
    assert found["results"]["number correct"] == expected
    assert expected > 0


def test_ppl_equals_lm_eval(theirs: HFReference, text: Path, shared: Path, tmp_path: Path) -> None:
    """lm_eval computes it with its own `hf` and windows. The detokenizer equals that of its WikiText task."""
    pytest.importorskip("lm_eval", reason="needs pip install lm_eval==0.4.13 accelerate")
    pytest.importorskip("accelerate", reason="needs pip install accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
    from transformers import GPT2Tokenizer

    load = ["--load", theirs.folder, *tokenizer_flags(shared), "--task", "PPL", "--valid-data", text]
    found = result_of(tmp_path, *load)["results"]
    files = [str(file) for file in theirs.tokenizer.files]
    tokenizer = GPT2Tokenizer(*files, eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    hf = HFLM(pretrained=theirs.model, tokenizer=tokenizer, device="cpu")
    content = text.read_text()
    request = Instance("loglikelihood_rolling", {}, (content,), 0)
    (total,) = hf.loglikelihood_rolling([request], disable_tqdm=True)
    assert found["bits per byte"] == pytest.approx(-total / math.log(2) / len(content.encode()), rel=1e-5)
    assert math.log(found["word ppl"]) == pytest.approx(-total / len(content.split()), rel=1e-5)
    whole = (shared / "data" / "wt2-test.txt").read_text(encoding="utf-8")
    assert detokenize(whole) == wikitext_detokenizer({"page": whole})


def test_vocabulary_padding_is_never_predicted() -> None:
    """If the logits of all words are negative, the zeros of the vocabulary padding are the largest."""
    logits = torch.tensor([[-3.0, -1.0, -2.0, 0.0], [-1.0, -2.0, -3.0, 0.0]])
    labels = torch.tensor([[1], [0]])
    batch = zero_shot.ZeroShotBatch(
        tokens=labels,
        position_ids=torch.zeros_like(labels),
        labels=labels,
        rows=torch.arange(2),
        positions=torch.zeros(2).long(),
        contexts=torch.zeros(2).long(),
        scored=torch.ones(2).long(),
    )
    task = types.SimpleNamespace(greedy=True)
    assert zero_shot.total(logits, batch, task, vocab_size=3, tp=ALONE, cp=ALONE) == 2
    assert zero_shot.total(logits, batch, task, vocab_size=4, tp=ALONE, cp=ALONE) == 0


def test_vocabulary_padding_is_kept_as_trained(native: Path) -> None:
    config, mesh = InferenceConfig(load=str(native), device="cpu"), Mesh(device=torch.device("cpu"))
    for as_trained, rows in ((True, 5120), (False, 5000)):
        checkpoint = find_any_checkpoint(config, TokenizerConfig(), mesh)
        model, _ = build_gpt(checkpoint, config, TokenizerConfig(), mesh, as_trained=as_trained)
        assert len(model.embedding.word_embeddings.weight) == rows
