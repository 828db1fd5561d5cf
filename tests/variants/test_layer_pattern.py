"""Windows, the cache that they bound, and layers without RoPE. tests/interop compares models with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, FLAGS, config_of, engine_of
from torch import Tensor

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.inference.batching import Batcher, Request
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import driver
from megatron.inference.kv_cache import KVCache
from megatron.inference.load import load_gpt
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.model.config import ModelConfig
from megatron.model.flops import attended_pairs, attention_flops, flops_per_sample
from megatron.model.gpt import GPTModel
from megatron.ops.attention import MaskSpec, make_mask
from megatron.parallel.mesh import ALONE, Mesh
from megatron.plugins import prepared, run
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.variants.layer_pattern import has_rope

ROPE = "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2"
PATTERN = (
    f"{ROPE} --window-size 3,0 --window-attn-skip-freq 4 --rotary-base-local 100 --no-rope-freq [1,0,0,0]"
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [None] * 4),
        ("--window-size 5,0", [5] * 4),
        ("--window-size (5,0)", [5] * 4),
        ("--window-size 5,0 --window-attn-skip-freq 2", [5, None, 5, None]),
        ("--window-size 5,0 --window-attn-skip-freq 4", [5, 5, 5, None]),
        ("--window-size 0,0 --window-attn-skip-freq [0]*2+[1]*2", [None, None, 0, 0]),
        ("--window-size 5,0 --window-attn-skip-freq ([1]+[0])*2", [5, None, 5, None]),
    ],
)
def test_windows_of_the_layers(flags: str, expected: list) -> None:
    assert config_of(flags).model.windows == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [True] * 4),
        ("--no-rope-freq 4", [True, True, True, False]),
        ("--no-rope-freq 1", [False] * 4),
        ("--no-rope-freq [0,1]*2", [True, False, True, False]),
    ],
)
def test_layers_with_rope(flags: str, expected: list) -> None:
    assert has_rope(config_of(f"{ROPE} {flags}").model) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--window-size 5", "--window-size: '5' is not L,0 for a number of positions L"),
        ("--window-size=-1,0", "--window-size: '-1,0' is not L,0 for a number of positions L"),
        ("--window-size 5,1", "--window-size: '5,1' is not L,0 for a number of positions L"),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq: 2 needs --window-size"),
        ("--rotary-base-local 100", "--rotary-base-local: 100.0 needs --window-size"),
        (
            "--window-size 5,0 --window-attn-skip-freq [1]*3",
            "--window-attn-skip-freq: [1]*3 is for 3 layers, and --num-layers is 4",
        ),
        (
            "--window-size 5,0 --window-attn-skip-freq ([1]*99999)*99999",
            "--window-attn-skip-freq: ([1]*99999)*99999 is for 9999800001 layers, and --num-layers is 4",
        ),
        ("--no-rope-freq 2", "--no-rope-freq: 2 needs --position-embedding-type rope"),
        (
            f"{ROPE} --no-rope-freq x",
            "--no-rope-freq: 'x' is neither a number nor a pattern such as '[0]*1+[1]*26'",
        ),
        (
            f"{ROPE} --no-rope-freq 0",
            "--no-rope-freq: 0 must be at least 1, or a pattern such as '[0]*1+[1]*26'",
        ),
        (
            f"{ROPE} --multi-latent-attention --no-rope-freq 2",
            "--no-rope-freq: 2 needs attention without --multi-latent-attention",
        ),
        (
            "--window-size 5,0 --position-embedding-type alibi",
            "--position-embedding-type alibi and --window-size 5,0 exclude each other; leave one of them out",
        ),
        (
            "--use-rope-scaling",
            "--use-rope-scaling needs --position-embedding-type rope; add it or leave the flag out",
        ),
        (
            "--rotary-percent 0.5",
            "--rotary-percent: 0.5 needs --position-embedding-type rope; add it or leave the flag out",
        ),
        (
            "--rotary-base 500000",
            "--rotary-base: 500000.0 needs --position-embedding-type rope; add it or leave the flag out",
        ),
        (
            "--window-size 5,0 --rotary-base-local 100",
            "--rotary-base-local: 100.0 needs --position-embedding-type rope; add it or leave the flag out",
        ),
        (
            "--window-size 5,0 --window-attn-skip-freq 1",
            "--window-attn-skip-freq: 1 gives no layer a window; drop it and --window-size",
        ),
        (
            f"{ROPE} --window-size 5,0 --mtp-num-layers 1",
            "--window-size: 5,0 excludes --mtp-num-layers; drop one",
        ),
    ],
)
def test_impossible_values(flags: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        prepared(config_of(flags), GPT)
    assert str(caught.value) == message


def test_bert_has_no_windows() -> None:
    with pytest.raises(InputError, match="--window-size: 5,0 is for GPT, not BERT"):
        prepared(config_of("--window-size 5,0"), bert(binary_head=True))


@pytest.mark.parametrize("window", [None, 0, 5, 31, 100])
def test_pairs_are_those_of_the_mask(window: int | None) -> None:
    model = config_of("" if window is None else f"--window-size {window},0").model
    mask = make_mask(MaskSpec(length=32, window=window, device=CPU))
    count = 32 * 33 / 2 if mask is None else mask.sum().item()
    assert attended_pairs(model, 32, causal=True) == [count] * 4


def test_flops_count_the_window() -> None:
    """An eighth of the keys in three of four layers."""
    sizes = {"seq_length": 64, "padded_vocab_size": 128, "num_logits": 64}
    full = config_of("").model
    some = config_of("--window-size 7,0 --window-attn-skip-freq 4").model
    saved = 3 * 3 * attention_flops(full, pairs=64 * 64 * 7 / 8)
    assert flops_per_sample(full, **sizes) - flops_per_sample(some, **sizes) == saved


def build(flags: str) -> GPTModel:
    (model,) = engine_of(Mesh(device=CPU), config_of(flags)).model.modules
    assert isinstance(model, GPTModel)
    return model


def logits(model: GPTModel, tokens: Tensor) -> Tensor:
    return model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))


@torch.no_grad()
def test_a_token_reaches_a_window_in_each_layer() -> None:
    """Three layers with a window of 2 positions back pass on a token by six positions."""
    model = build(f"{ROPE} --window-size 2,0 --num-layers 3")
    tokens = torch.randint(59, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 59
    differs = (logits(model, tokens) != logits(model, changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(4, 4 + 3 * 2 + 1))


@torch.no_grad()
def test_a_window_of_all_positions_is_none() -> None:
    flags = "--rotary-base 100 --num-layers 2"
    tokens = torch.randint(59, (2, 16), generator=torch.Generator().manual_seed(0))
    whole = logits(build(f"{ROPE} {flags}"), tokens)
    assert torch.equal(logits(build(f"{ROPE} {flags} --window-size 15,0"), tokens), whole)
    assert not torch.allclose(logits(build(f"{ROPE} {flags} --window-size 14,0"), tokens), whole)


@torch.no_grad()
def test_the_local_base_is_that_of_layers_with_windows() -> None:
    """A model whose layers all have a window equals one with the local base as its base."""
    tokens = torch.randint(59, (2, 16), generator=torch.Generator().manual_seed(0))
    local = build(f"{ROPE} --window-size 3,0 --rotary-base 1e6 --rotary-base-local 100")
    plain = build(f"{ROPE} --window-size 3,0 --rotary-base 100")
    assert torch.equal(logits(local, tokens), logits(plain, tokens))


@torch.no_grad()
def test_without_rope_in_any_layer_positions_do_not_matter() -> None:
    tokens = torch.randint(59, (2, 16), generator=torch.Generator().manual_seed(0))
    none = build(ROPE.replace("rope", "none"))
    assert torch.equal(logits(build(f"{ROPE} --no-rope-freq 1"), tokens), logits(none, tokens))


def test_recomputation_gives_the_same_gradients() -> None:
    tokens = torch.randint(59, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for flags in ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"):
        engine = engine_of(Mesh(device=CPU), config_of(f"{PATTERN} {flags}"))
        (model,) = engine.model.modules
        logits(model, tokens).square().sum().backward()
        gradients.append([main_grad.clone() for main_grad in (p.main_grad for p in model.parameters())])
    assert all(map(torch.allclose, *gradients))


def test_the_cache_holds_the_window() -> None:
    """Three of four layers store 4 positions of 16."""
    config = config_of(PATTERN).model
    cache = KVCache(config, range(4), ALONE, rows=3, length=16, dtype=torch.float32, device=CPU)
    assert cache.memory.shape == (1, 2, 3, 4, 16, 8)
    assert cache.window_memory.shape == (3, 2, 3, 4, 4, 8)


LENGTH, EOD = 16, 58
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=EOD)
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]


def generate_with_cache(folder: str, tensor: int, pipeline: int) -> list[list[int]] | None:
    """Greedy continuations of more prompts than the batch has rows, so that rows are moved and used again."""

    def work(predictor: Predictor, tokenizer: Tokenizer) -> list[list[int]]:
        predictor.reserve(2, LENGTH)
        batcher = Batcher(predictor, tokenizer)
        greedy = SamplingConfig(out_seq_length=LENGTH, greedy=True)
        states = [batcher.add(Request(prompt=prompt, sampling=greedy)) for prompt in PROMPTS]
        while batcher.waiting or batcher.running:
            batcher.step()
        return [state.new for state in states]

    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    return driver(InferenceConfig(load=folder, **sizes), TOKENIZER, work)


def test_generation_equals_passes_over_all_tokens(pretrain: Callable, tmp_path: Path) -> None:
    flags = f"""
        {PATTERN} --init-method-std 0.5 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH}
        --mock-data --tokenizer-type NullTokenizer --vocab-size {EOD} --micro-batch-size 2
        --global-batch-size 2 --train-iters 1 --eval-iters 0 --lr 1e-3 --num-workers 0 --device cpu --save {tmp_path}
    """
    pretrain(*flags.split())
    model, _ = load_gpt(InferenceConfig(load=str(tmp_path)), TOKENIZER, Mesh(device=CPU))
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < LENGTH and tokens[-1] != EOD:
            with torch.no_grad():
                tokens.append(int(logits(model, torch.tensor([tokens]))[0, -1].argmax()))
        expected.append([token for token in tokens[len(prompt) :] if token != EOD])
    assert len({token for tokens in expected for token in tokens}) > 5
    assert generate_with_cache(str(tmp_path), 1, 1) == expected
    found, *_ = run_distributed(generate_with_cache, 4, str(tmp_path), 2, 2)
    assert found == expected


def train(folder: str, flags: str) -> None:
    words = f"{FLAGS} {PATTERN} --num-workers 0 --log-interval 1 --eval-iters 1 --train-iters 4 {flags}"
    words += f" --global-batch-size 4 --metrics-path {folder}/metrics.jsonl"
    assert run(parse_run_config(words.split(), description="", defaults=DEFAULTS), GPT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_context_parallelism_trains_alike(tmp_path: Path, kind: str) -> None:
    """Windows, a local base and layers without RoPE, with each sequence divided over two ranks."""
    records = []
    for processes, flags in ((1, ""), (2, f"--context-parallel-size 2 --cp-comm-type {kind}")):
        folder = tmp_path / str(processes)
        folder.mkdir()
        run_distributed(train, processes, str(folder), flags)
        records.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert len(records[0]) == len(records[1]) >= 5
    assert records[1][0]["grad norm"] == pytest.approx(records[0][0]["grad norm"], rel=1e-6)
    for one, two in zip(*records, strict=True):
        for key in one.keys() & {"lm loss", "lm loss validation"}:
            assert two[key] == pytest.approx(one[key], rel=1e-5)


def test_published_configs_have_windows_of_their_layers() -> None:
    """Gemma 3: five local layers for a global one; gpt-oss: every second; Llama 4: RoPE in three of four."""
    sizes = {"num_layers": 24, "hidden_size": 64, "num_attention_heads": 4, "position_embedding_type": "rope"}
    gemma = ModelConfig(**sizes, window_size="511,0", window_attn_skip_freq="6")
    assert [layer for layer, window in enumerate(gemma.windows) if window is None] == [5, 11, 17, 23]
    gpt_oss = ModelConfig(**sizes, window_size="127,0", window_attn_skip_freq="2")
    assert gpt_oss.windows == [127, None] * 12
    llama = ModelConfig(**sizes, no_rope_freq="4")
    assert [layer for layer, rope in enumerate(has_rope(llama)) if not rope] == [3, 7, 11, 15, 19, 23]
