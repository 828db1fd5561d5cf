"""Published models by name."""

from __future__ import annotations

import pytest

from megatron.commands.plan_inputs import PlanConfig, make_job
from megatron.errors import InputError
from megatron.planner.dense import DENSE
from megatron.planner.parameters import model_parameters
from megatron.planner.presets import ALIASES, NAMED, find_preset

# Billions of parameters, by model cards, papers and the Hugging Face Hub's counts of the checkpoints' tensors.
BILLIONS = {
    "gpt2": 0.1244,
    "gpt2-medium": 0.355,
    "gpt2-large": 0.774,
    "gpt2-xl": 1.558,
    "gpt3-6.7b": 6.7,
    "gpt3-13b": 12.9,
    "gpt3-175b": 174.6,
    "llama-7b": 6.738,
    "llama-13b": 13.016,
    "llama-30b": 32.529,
    "llama-65b": 65.286,
    "llama2-7b": 6.738,
    "llama2-13b": 13.016,
    "llama2-70b": 68.977,
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "llama3.1-405b": 405.85,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-3b": 3.086,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "mistral-7b": 7.242,
    "mistral-nemo-12b": 12.248,
    "mistral-small-24b": 23.572,
    "gemma-2b": 2.506,
    "gemma-7b": 8.538,
    "gemma2-2b": 2.614,
    "gemma2-9b": 9.242,
    "gemma2-27b": 27.227,
    "gemma3-1b": 1.000,
    "gemma3-4b": 3.880,
    "gemma3-12b": 11.766,
    "gemma3-27b": 27.009,
}


@pytest.mark.parametrize("name", DENSE)
def test_named_models_have_their_published_sizes(name: str) -> None:
    job = make_job(PlanConfig(model=name), {})
    assert model_parameters(job) / 1e9 == pytest.approx(BILLIONS[name], rel=0.007 if "gpt3" in name else 1e-3)
    assert 2**21 < job.seq_length * job.global_batch_size <= 2**24


@pytest.mark.parametrize(
    ("name", "seq_length", "batch"),
    [
        ("llama3-8b", None, 512),
        ("llama3-8b", 65536, 64),
        ("llama3-8b", 10000, 256),
        ("llama3-8b", 2**23, 1),
        ("llama3.1-405b", 131072, 2048),
        ("mixtral-8x7b", 8192, 256),
        ("175b", 4096, 1536),
    ],
)
def test_a_step_has_the_authors_samples_or_4_million_tokens(name: str, seq_length: int | None, batch: int):
    longer = {} if seq_length is None else {"seq_length": seq_length}
    assert make_job(PlanConfig(model=name, **longer), {}).global_batch_size == batch


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Llama3-8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("meta-llama/Llama-3.1-405B", "llama3.1-405b"),
        ("llama_3.1_70b", "llama3-70b"),
        ("405b", "llama3.1-405b"),
        ("Qwen/Qwen2.5-32B", "qwen2.5-32b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("Qwen3-0.6B-Base", "qwen3-0.6b"),
        ("google/gemma2-9b-it", "gemma2-9b"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("gpt2", "gpt2"),
        ("GPT-3", "gpt3-175b"),
        ("175b", "175b"),
        ("1t", "1t"),
    ],
)
def test_names_that_people_use(given: str, name: str) -> None:
    assert find_preset(given)[0] == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("llama3", r"'llama3' may be one of llama3-70b, llama3-8b, llama3.1-405b; choose one$"),
        ("llama3-80b", r"'llama3-80b' is not a known model; close are llama3-8b"),
        ("7b", r"'7b' may be one of gemma-7b, llama-7b, llama2-7b, mistral-7b, qwen2.5-7b; choose one$"),
        ("qwen3-33b", r"'qwen3-33b' is not a known model; close are .*qwen3-32b"),
        ("#", r"'#' is not a known model; known are 345m, .*gpt-oss-120b; others are described"),
    ],
)
def test_unknown_names_list_close_ones(given: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_preset(given)


def test_every_alias_is_a_known_model() -> None:
    assert set(ALIASES.values()) <= set(NAMED) and not set(ALIASES) & set(NAMED)
