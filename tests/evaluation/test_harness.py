"""lm-evaluation-harness on a GPT of ours, against its own `hf` on the same weights, task by task and number by number.

Needs `pip install lm_eval==0.4.13 accelerate`, and is skipped without; `hf` needs the second.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import save_hf

from megatron.flags import InputError
from megatron.inference.generate import SamplingConfig
from megatron.tokenizer.train import train_bpe

lm_eval = pytest.importorskip("lm_eval", reason="needs pip install lm_eval==0.4.13 accelerate")
pytest.importorskip("accelerate", reason="needs pip install accelerate")
pytest.importorskip("transformers")

WORDS = "the a cat dog bird sat ran flew on under over mat hat tree quickly slowly and then but so 12 7 I'm".split()
LENGTH = 48
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1] | join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "continue": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["at", "\\n"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
    "draw": """
output_type: generate_until
doc_to_text: "the"
doc_to_target: "{{text}}"
repeats: 2
generation_kwargs: {do_sample: true, temperature: 0.8, top_k: 20, max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}
COMPARED = ["choice", "last_word", "pages", "continue"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks over a file of texts of 1 to 120 words."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(1)
    lengths = [2, 3, 5, 5, 6, 8, 12, 20, 30, 47, 48, 49, 70, 120]
    samples = []
    for length in lengths:
        text = " ".join(rng.choices(WORDS, k=length))
        choices = [" " + " ".join(rng.choices(WORDS, k=rng.choice((1, 1, 2, 5)))) for _ in range(4)]
        samples.append({"text": text, "choices": choices, "gold": rng.randrange(4)})
    data = folder / "samples.json"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for name, task in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{task}")
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face's with a tiny GPT-2 of random weights."""
    folder = save_hf(tmp_path_factory.mktemp("gpt2"), "gpt2", vocab_size=280, n_positions=LENGTH)
    files = train_bpe([" ".join(WORDS)] * 4, 280)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).write_text(files[name])
    return folder


@pytest.fixture(scope="module")
def run(tasks: Path) -> Callable[..., dict[str, Any]]:
    """Runs tasks on a model, and gives lm_eval's results."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lambda model, names: lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, bootstrap_iters=0
    )


def responses(results: dict[str, Any], task: str) -> list:
    """What the model answered to each request of a task."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answers in sample["resps"] for answer in answers]


@pytest.fixture(scope="module")
def theirs(gpt2: Path, run: Callable) -> dict[str, Any]:
    """The results of lm_eval's own model for folders of Hugging Face's."""
    from lm_eval.models.huggingface import HFLM

    return run(HFLM(pretrained=str(gpt2), device="cpu", batch_size=3), COMPARED)


def test_hf(gpt2, run, theirs):
    from megatron.evaluation.harness import MegatronLM
    ours = run(MegatronLM(str(gpt2), device="cpu", batch_size=3), COMPARED)
    for name in COMPARED:
        print(name, ours["results"][name], theirs["results"][name])
        for a, b in zip(responses(ours, name), responses(theirs, name), strict=True):
            print(a, b)
    assert 0
