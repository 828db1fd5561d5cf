"""Generation and evaluation of mixtures of experts, in one process and with experts divided among the ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import serving
import torch
from distributed import run_distributed
from models import CPU

from megatron.arguments import parse_run_config
from megatron.commands import evaluate
from megatron.errors import InputError
from megatron.inference.batching import Batcher, Request
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import driver
from megatron.inference.load import load_gpt
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.parallel.mesh import Mesh
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

LENGTH, EOD = 20, 59
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=EOD)
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]
# Tokens beyond the capacity are dropped in training.
EXPERTS = """
    --num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-layer-freq [0]*1+[1]*2
    --moe-expert-capacity-factor 0.5 --swiglu --disable-bias-linear --init-method-std 0.2 --num-layers 3
    --hidden-size 32 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0
"""
LAYOUTS = [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow), (2, 2, 1)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    flags = f"""
        {EXPERTS} --seq-length {LENGTH} --mock-data --tokenizer-type NullTokenizer --vocab-size {EOD}
        --micro-batch-size 2 --global-batch-size 2 --train-iters 2 --eval-iters 0 --lr 1e-3 --num-workers 0
        --device cpu --save {folder}
    """
    assert run(parse_run_config(flags.split(), description="", defaults=DEFAULTS), GPT) == 0
    return str(folder)


def inference(folder: str, layout: tuple[int, int, int]) -> InferenceConfig:
    """The settings for tensor, expert and expert-tensor parallelism."""
    tensor, experts, parts = layout
    return InferenceConfig(
        load=folder,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=parts,
    )


def generate(folder: str, layout: tuple[int, int, int]) -> list[list[int]] | None:
    """Greedy continuations of more prompts than the batch has rows."""

    def work(predictor: Predictor, tokenizer: Tokenizer) -> list[list[int]]:
        predictor.reserve(2, LENGTH)
        batcher = Batcher(predictor, tokenizer)
        greedy = SamplingConfig(out_seq_length=LENGTH, greedy=True)
        states = [batcher.add(Request(prompt=prompt, sampling=greedy)) for prompt in PROMPTS]
        while batcher.waiting or batcher.running:
            batcher.step()
        return [state.new for state in states]

    return driver(inference(folder, layout), TOKENIZER, work)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_generation_equals_passes_over_all_tokens(trained: str, layout: tuple[int, int, int]) -> None:
    model, _ = load_gpt(InferenceConfig(load=trained), TOKENIZER, Mesh(device=CPU))
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < LENGTH and tokens[-1] != EOD:
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0))
            tokens.append(int(logits[0, -1].argmax()))
        expected.append([token for token in tokens[len(prompt) :] if token != EOD])
    assert len({token for tokens in expected for token in tokens}) > 10
    found = generate(trained, layout) if layout[0] == 1 else run_distributed(generate, 2, trained, layout)[0]
    assert found == expected


def test_the_server_answers_concurrent_requests(trained: str) -> None:
    model, tokenizer = load_gpt(InferenceConfig(load=trained), TOKENIZER, Mesh(device=CPU))
    expected = [serving.words(tokens) for tokens in generate(trained, (1, 1, 1)) or []]
    with (
        serving.serving(Predictor([model], Mesh(device=CPU)), tokenizer) as (url, _),
        ThreadPoolExecutor(4) as clients,
    ):
        bodies = [
            {"prompt": serving.words(prompt), "max_tokens": LENGTH, "temperature": 0} for prompt in PROMPTS
        ]
        answers = list(clients.map(lambda body: serving.complete(url, **body), bodies))
    assert [answer.json()["choices"][0]["text"].split() for answer in answers] == [
        text.split() for text in expected
    ]


def evaluate_text(folder: str, text: str, output: str, tensor: int, experts: int) -> None:
    words = f"--load {folder} --task WIKITEXT103 --valid-data {text} --device cpu --output-path {output}"
    words += f" --tensor-model-parallel-size {tensor} --expert-model-parallel-size {experts}"
    evaluate.main(words.split())


def test_evaluation_in_layouts(trained: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(str(i * i % EOD) for i in range(200)))
    results = []
    for processes, experts in ((1, 1), (2, 2)):
        output = tmp_path / f"{processes}.json"
        run_distributed(evaluate_text, processes, trained, str(text), str(output), processes, experts)
        results.append(json.loads(output.read_text())["results"])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_impossible_layouts() -> None:
    with pytest.raises(
        InputError, match="3 times --expert-tensor-parallel-size 1 is not --tensor-model-parallel"
    ):
        InferenceConfig(load="x", tensor_model_parallel_size=4, expert_model_parallel_size=3)
