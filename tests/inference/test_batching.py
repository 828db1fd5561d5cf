"""Generation, against transformers on the same weights, and in all layouts against one process."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from distributed import run_distributed
from hf_models import VOCAB, save_hf

from megatron.errors import InputError
from megatron.inference.batching import Batcher, Request, SequenceState, generate
from megatron.inference.beam import BeamConfig, beam_search
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import driver
from megatron.inference.kv_cache import KVCache
from megatron.inference.load import load_gpt
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.parallel.mesh import Mesh
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.null import NullTokenizer

CPU = torch.device("cpu")
LENGTH = 32  # context length of the models
EOD = VOCAB - 1
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=EOD)
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3], [1] * 31, [2, 7], [1, 8, 2, 8]]


def make_batcher(folder: Path, rows: int = 4, dtype: str = "auto") -> Batcher:
    config = InferenceConfig(load=str(folder), dtype=dtype)
    model, tokenizer = load_gpt(config, TOKENIZER, Mesh(device=CPU))
    predictor = Predictor([model], Mesh(device=CPU))
    predictor.reserve(rows, LENGTH)
    return Batcher(predictor, tokenizer)


def run_requests(batcher: Batcher, requests: list[Request]) -> list[SequenceState]:
    states = [batcher.add(request) for request in requests]
    while batcher.waiting or batcher.running:
        batcher.step()
    return states


def request(prompt: list[int], **fields: object) -> Request:
    sampling = {"out_seq_length": 40, "greedy": True}
    names = {field.name for field in dataclasses.fields(SamplingConfig)}
    sampling |= {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    return Request(prompt=prompt, sampling=SamplingConfig(**sampling), **others)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "model", request.param)


def generate_with_transformers(folder: Path, prompt: list[int], **settings: object):
    """transformers' generation up to the end of the context."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "max_length": LENGTH, "eos_token_id": EOD, "pad_token_id": 0} | settings
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **settings,
    )


def until_eod(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOD)] if EOD in tokens else tokens


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_tokens_and_logprobs_equal_transformers(folder: Path, penalty: float) -> None:
    assert_greedy_equals_transformers(folder, penalty)


@pytest.mark.parametrize("kind", ["gpt_neox", "olmo2", "opt", "bloom", "gemma"])
def test_generation_of_other_families_equals_transformers(tmp_path: Path, kind: str) -> None:
    assert_greedy_equals_transformers(save_hf(tmp_path, kind), 1.0)


def test_alibi_in_bf16_has_a_cache_in_fp32(tmp_path: Path) -> None:
    """On a CPU, where the bias has the dtype of the cache."""
    folder = save_hf(tmp_path, "bloom", torch.bfloat16)
    requests = [request(prompt, out_seq_length=4) for prompt in PROMPTS[:3]]
    batcher = make_batcher(folder, dtype="bf16")
    predictor = batcher.predictor
    assert (predictor.stages.dtype, predictor.cache.memory.dtype) == (torch.bfloat16, torch.float32)
    for state in run_requests(batcher, requests):
        assert len(state.new) == 4 or state.reason == "stop"


def assert_greedy_equals_transformers(folder: Path, penalty: float) -> None:
    """Prompts of different lengths, more than the batch has rows."""
    requests = [request(prompt, repetition_penalty=penalty, top_logprobs=3) for prompt in PROMPTS]
    for state in run_requests(make_batcher(folder), requests):
        prompt = state.request.prompt
        out = generate_with_transformers(folder, prompt, repetition_penalty=penalty)
        expected = out.sequences[0, len(prompt) :].tolist()
        assert state.new == until_eod(expected)
        assert state.reason == ("stop" if EOD in expected else "length")
        for token, score, logits in zip(expected, state.logprobs, out.logits, strict=True):
            logprobs = logits[0].log_softmax(-1)
            assert score.logprob == pytest.approx(logprobs[token].item(), abs=1e-4)
            best = logprobs.topk(3)
            assert [i for i, _ in score.top] == best.indices.tolist()
            assert [p for _, p in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompt_logprobs(folder: Path) -> None:
    import transformers

    prompt = PROMPTS[2]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    (_, state) = run_requests(
        make_batcher(folder), [request([1]), request(prompt, top_logprobs=0, prompt_logprobs=True)]
    )
    expected = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
    assert [score.logprob for score in state.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("piece", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6, 7, 100))])
def test_prompts_are_scored_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, piece: int
) -> None:
    """As in one pass, with ALiBi, windows and sinks too. The cache is then that of the whole prompt."""
    predictor = make_batcher(save_hf(tmp_path, kind)).predictor
    prompt = [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
    whole = predictor.forward(0, [0], [prompt], all_positions=True).log_softmax(-1)
    after = predictor.forward(0, [len(prompt)], [[5]]).log_softmax(-1)
    monkeypatch.setattr("megatron.inference.batching.MAX_SCORED_TOKENS", piece)
    forward, lengths = predictor.forward, []

    def counted(*inputs, **options) -> torch.Tensor:
        lengths.append(len(inputs[2][0]))
        return forward(*inputs, **options)

    monkeypatch.setattr(predictor, "forward", counted)
    (state,) = run_requests(
        Batcher(predictor, NullTokenizer(EOD)),
        [request(prompt, top_logprobs=2, prompt_logprobs=True, out_seq_length=1)],
    )
    assert max(lengths) == min(piece, len(prompt)) and sum(lengths) == len(prompt)
    assert len(state.prompt_logprobs) == len(prompt) - 1
    for row, token, score in zip(whole[:-1], prompt[1:], state.prompt_logprobs, strict=True):
        assert score.logprob == pytest.approx(row[token].item(), abs=1e-5)
        assert [p for _, p in score.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-5)
    assert state.logprobs[0].logprob == pytest.approx(whole[-1].max().item(), abs=1e-5)
    torch.testing.assert_close(forward(0, [len(prompt)], [[5]]).log_softmax(-1), after, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (2, 0.0), (3, 1.0), (4, 2.0)])
def test_beam_search_equals_transformers(folder: Path, width: int, penalty: float) -> None:
    predictor = make_batcher(folder).predictor
    for prompt in PROMPTS[:4]:
        config = BeamConfig(beam_width=width, length_penalty=penalty)
        found = beam_search(predictor, prompt, config, length=LENGTH, ends={EOD})
        out = generate_with_transformers(
            folder, prompt, num_beams=width, length_penalty=penalty, num_return_sequences=width
        )
        expected = [until_eod(row[len(prompt) :].tolist()) for row in out.sequences]
        assert [list(hypothesis.tokens) for hypothesis in found] == expected
        if width > 1:
            scores = [hypothesis.score for hypothesis in found]
            assert scores == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("width", [None, 3])
def test_texts_end_at_each_of_several_tokens(folder: Path, width: int | None) -> None:
    """As transformers with a list of eos_token_id, which chat models have for the end of a turn."""
    batcher = make_batcher(folder)
    for prompt in PROMPTS[:3]:
        whole = generate_with_transformers(folder, prompt).sequences[0, len(prompt) :].tolist()
        ends = {EOD, *whole[5:10:4]}
        settings = {} if width is None else {"num_beams": width, "length_penalty": 1.0}
        out = generate_with_transformers(folder, prompt, eos_token_id=sorted(ends), **settings)
        expected = out.sequences[0, len(prompt) :].tolist()
        expected = expected[: next((i for i, token in enumerate(expected) if token in ends), None)]
        if width is None:
            batcher.ends = frozenset(ends)
            (state,) = run_requests(batcher, [request(prompt, top_logprobs=0)])
            assert (state.new, state.reason) == (expected, "stop") and len(expected) <= 5
            assert state.end_token in ends and len(state.logprobs) == len(expected) + 1
        else:
            config = BeamConfig(beam_width=width)
            found = beam_search(batcher.predictor, prompt, config, length=LENGTH, ends=ends)
            assert list(found[0].tokens) == expected


SAMPLED = [
    request(prompt, greedy=False, temperature=0.9, top_k=20 * (i % 2), top_p=0.9 * (i % 3 > 0), seed=i)
    for i, prompt in enumerate(PROMPTS)
]


def test_samples_do_not_depend_on_the_batch(folder: Path) -> None:
    """Sampled tokens do not depend on other requests, nor on when those start, end or are cancelled."""
    expected = [run_requests(make_batcher(folder, rows=1), [r])[0].new for r in SAMPLED]
    assert len({tuple(new) for new in expected}) > 5
    assert [state.new for state in run_requests(make_batcher(folder), SAMPLED)] == expected
    batcher, states = make_batcher(folder, rows=3), []
    for r in SAMPLED:
        states.append(batcher.add(r))
        cancelled = batcher.add(request([1, 2, 3], greedy=False))
        for _ in range(4):
            batcher.step()
        batcher.cancel(cancelled)
    while batcher.waiting or batcher.running:
        batcher.step()
    assert [state.new for state in states] == expected


def test_a_request_is_sampled_with_its_seed(folder: Path) -> None:
    assert make_batcher(folder).add(request([1], seed=5)).sampler.generator.initial_seed() == 5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_with_prompts_of_different_lengths(folder: Path, dtype: str) -> None:
    """Each token is close to the most probable one in fp32, since rounding may swap tokens of similar probability."""
    exact = make_batcher(folder).predictor
    for state in run_requests(make_batcher(folder, dtype=dtype), [request(prompt) for prompt in PROMPTS]):
        logits_nv = exact.forward(0, [0], [state.tokens[:-1]], all_positions=True)[-len(state.new) :]
        chosen = logits_nv.gather(1, torch.tensor(state.new).unsqueeze(1)).squeeze(1)
        assert (logits_nv.amax(-1) - chosen).max() < 0.2


def test_stop_strings(folder: Path) -> None:
    (whole,) = generate(make_batcher(folder), [request([5, 9, 2, 6, 5, 3, 5], greedy=False, seed=2)])
    words = whole.split()
    stop = f" {words[3]} "
    (cut,) = generate(
        make_batcher(folder), [request([5, 9, 2, 6, 5, 3, 5], greedy=False, seed=2, stops=["never", stop])]
    )
    assert cut == whole.split(stop)[0] and len(cut) < len(whole)


def test_empty_and_too_long_prompts(folder: Path) -> None:
    for prompt in ([], [1] * LENGTH):
        with pytest.raises(InputError, match="the prompt"):
            make_batcher(folder).add(request(prompt))


def test_a_beam_search_can_be_cancelled_before_each_forward_pass(folder: Path) -> None:
    predictor = make_batcher(folder).predictor
    forward, done = predictor.forward, []
    predictor.forward = lambda *inputs: done.append(inputs) or forward(*inputs)

    def cancel() -> None:
        if len(done) == passes:
            raise InterruptedError

    for passes in (0, 1, 2):
        done.clear()
        with pytest.raises(InterruptedError):
            beam_search(predictor, [3, 1], BeamConfig(beam_width=3), length=9, ends=(), check=cancel)
        assert len(done) == passes


class Outputs(NamedTuple):
    texts: list[str]
    prompt_scores: list[float]
    beams: list[tuple[int, ...]]


def outputs_of(batcher: Batcher) -> Outputs:
    texts = generate(batcher, [*SAMPLED, *map(request, PROMPTS)])
    (scored,) = run_requests(batcher, [request(PROMPTS[2], prompt_logprobs=True)])
    beams = beam_search(batcher.predictor, [3, 1], BeamConfig(beam_width=3), length=9, ends=())
    return Outputs(texts, [x.logprob for x in scored.prompt_logprobs], [beam.tokens for beam in beams])


def in_layout(folder: str, layout: dict[str, int]) -> Outputs | None:
    def work(predictor: Predictor, tokenizer: Tokenizer) -> Outputs:
        predictor.reserve(4, LENGTH)
        outputs = outputs_of(Batcher(predictor, tokenizer))
        assert not predictor.stages.transfers.sending
        return outputs

    return driver(InferenceConfig(load=folder, **layout), TOKENIZER, work)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((2, 1), marks=pytest.mark.slow, id="T2"),
        pytest.param((1, 2), marks=pytest.mark.slow, id="P2"),
        pytest.param((2, 2), id="T2 P2"),
    ],
)
def test_layouts_agree(folder: Path, layout: tuple[int, int]) -> None:
    sizes = dict(zip(("tensor_model_parallel_size", "pipeline_model_parallel_size"), layout, strict=True))
    expected = outputs_of(make_batcher(folder))
    found, *others = run_distributed(in_layout, layout[0] * layout[1], str(folder), sizes)
    assert (found.texts, found.beams) == (expected.texts, expected.beams)
    assert found.prompt_scores == pytest.approx(expected.prompt_scores, abs=1e-4)
    assert not any(others)


def test_missing_tokenizer_names_the_flag(folder: Path) -> None:
    for given, message in (
        (TokenizerConfig(), f"--load: {folder} has no tokenizer; give --tokenizer, "),
        (TokenizerConfig(vocab_file="x"), "--tokenizer is required with other tokenizer flags"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            load_gpt(InferenceConfig(load=str(folder)), given, Mesh(device=CPU))


def test_non_finite_logits_are_one_line(folder: Path) -> None:
    batcher = make_batcher(folder)
    batcher.predictor.stages.chunks[0].decoder.layers["0"].mlp.linear_fc2.weight.fill_(float("nan"))
    with pytest.raises(InputError, match=r"^--load: the model's logits are not finite"):
        generate(batcher, [request([1])])


@pytest.mark.parametrize("failing", [2, 3])
def test_sequences_that_fail_together_leave_no_nan(folder: Path, failing: int) -> None:
    """Rows move when sequences end. A later sequence masks the rest of its row, but 0 x NaN is NaN."""
    batcher = make_batcher(folder)
    good = [request([1, 2, 3, 4, 5, 6]), request([3]), request([2, 7]), request([5, 1])]
    expected = [state.new for state in run_requests(batcher, good)]
    predictor = batcher.predictor
    forward = predictor.forward

    def overflowing(first: int, starts: list[int], tokens: list[list[int]], **options: bool) -> torch.Tensor:
        logits = forward(first, starts, tokens, **options).clone()
        for i, row in enumerate(tokens):
            if 98 in row:
                logits[i] = predictor.cache.memory[:, :, first + i] = torch.nan
        return logits

    predictor.forward = overflowing
    states = run_requests(batcher, [request([98, 98, 9])] * failing)
    assert [state.reason for state in states] == ["error"] * failing
    predictor.forward = forward
    assert [state.new for state in run_requests(batcher, good)] == expected
    assert predictor.cache.memory.isfinite().all()


def generate_after_faults(folder: str) -> list[str] | None:
    """Generate after rank 1 ran out of memory, and after Ctrl-C in a forward pass."""

    def no_memory(*args: object, rows: int, **others: object) -> KVCache:
        if rows == 1000 and os.environ["RANK"] == "1":
            raise RuntimeError
        return KVCache(*args, rows=rows, **others)

    def work(predictor: Predictor, tokenizer: Tokenizer) -> list[str]:
        with pytest.raises(InputError, match="not enough cpu memory for the key/value cache of 1000 texts"):
            predictor.reserve(1000, LENGTH)
        predictor.reserve(4, LENGTH)
        forward = predictor._forward

        def interrupted(*args: object) -> torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            return forward(*args)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(predictor, "_forward", interrupted)
            generate(Batcher(predictor, tokenizer), SAMPLED)
        return generate(Batcher(predictor, tokenizer), SAMPLED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.inference.predictor.KVCache", no_memory)
        return driver(InferenceConfig(load=folder, tensor_model_parallel_size=2), TOKENIZER, work)


def test_other_ranks_survive_faults_of_a_command(tmp_path: Path) -> None:
    """The model has a single key/value group, which both processes hold."""
    folder = save_hf(tmp_path / "model", "llama 3")
    found = run_distributed(generate_after_faults, 2, str(folder))
    assert found == [generate(make_batcher(folder), SAMPLED), None]
