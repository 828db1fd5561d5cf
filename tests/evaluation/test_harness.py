"""lm-evaluation-harness gives MegatronLM and its own `hf` model the same scores on the same weights.

Needs `pip install lm_eval==0.4.13 accelerate` (accelerate for `hf`); skipped otherwise.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hf_models import save_hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from megatron.commands import convert_checkpoint
from megatron.errors import InputError
from megatron.inference.sampling import SamplingConfig
from megatron.tokenizer.train import train_bpe
from tools import lm_eval_adapter

lm_eval = pytest.importorskip("lm_eval", reason="needs pip install lm_eval==0.4.13 accelerate")
pytest.importorskip("accelerate", reason="needs pip install accelerate")
pytest.importorskip("transformers")

from lm_eval.api.model import LM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from megatron.evaluation import harness  # noqa: E402
from megatron.evaluation.harness import MegatronLM, run_tasks, sampling  # noqa: E402

WORDS = "the a cat dog bird sat ran flew on under over mat hat tree quickly slowly and then but so 12 7 I'm".split()
LENGTH = 48  # context length of the models
IDS = 320
LENGTHS = [2, 3, 5, 5, 6, 8, 12, 20, 30, 46, 47, 48, 49, 95, 96, 97, 120] * 2  # lengths of the texts in words
SAMPLES = len(LENGTHS)
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
generation_kwargs: {until: ["birdog", "dogdog", "\\n"], max_gen_toks: 9}
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


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Set HF_HUB_OFFLINE and HF_DATASETS_OFFLINE after import, since the tests need no network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield


def source(data: Path) -> str:
    """Lines of a task's file that read samples from a file."""
    files = f"{{data_files: {{test: {data}}}, cache_dir: {data.parent / 'cache'}}}"
    return f"dataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of tasks over a file of texts."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(1)
    samples = []
    for length in LENGTHS:
        text = " ".join(
            [*rng.choices(WORDS, k=length - 1), rng.choice(("bir", "mat"))]
        )  # the models are likely to generate the first
        choices = [" " + " ".join(rng.choices(WORDS, k=rng.choice((1, 1, 2, 5)))) for _ in range(4)]
        samples.append({"text": text, "choices": choices, "gold": rng.randrange(4)})
    data = folder / "samples.json"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source(data)}{task}")
    return folder


def save_model(folder: Path, kind: str, names: tuple[str, ...], vocab_size: int) -> Path:
    """Save a tiny Hugging Face model with random weights, and these files of its tokenizer."""
    length = {"gpt2": "n_positions", "llama": "max_position_embeddings"}[kind]
    save_hf(folder, kind, vocab_size=vocab_size, **{length: LENGTH, "tie_word_embeddings": False})
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][:256] *= 0.1  # generate words instead of single bytes
    if kind == "gpt2":
        weights["transformer.ln_f.bias"][:] = 0  # and vary them
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rng = random.Random(0)
    files = train_bpe([" ".join(rng.choices(WORDS, k=50)) for _ in range(20)], IDS)
    for name in names:
        (folder / name).write_text(files[name])
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a GPT-2."""
    names = ("vocab.json", "merges.txt", "tokenizer_config.json")
    return save_model(tmp_path_factory.mktemp("gpt2"), "gpt2", names, IDS)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Folder of a Llama whose tokenizer prepends a BOS token."""
    folder = save_model(tmp_path, "llama", ("tokenizer.json",), IDS + 1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", IDS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


@pytest.fixture(scope="module")
def run(tasks: Path) -> Callable[..., dict[str, Any]]:
    """Function that runs tasks on a model and returns lm_eval's results."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lambda model, names: lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, bootstrap_iters=0
    )


def responses(results: dict[str, Any], task: str) -> list:
    """Responses of the model to all requests of a task."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answers in sample["resps"] for answer in answers]


def hf(folder: Path) -> LM:
    """lm_eval's own model for Hugging Face folders."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=3)


@pytest.fixture(scope="module")
def theirs(gpt2: Path, run: Callable) -> dict[str, Any]:
    """Results of `hf` on the GPT-2."""
    return run(hf(gpt2), COMPARED)


def assert_same_results(ours: dict[str, Any], theirs: dict[str, Any], *, within: float) -> None:
    """Assert equal answers and metrics; texts and choices must be exactly equal."""
    for task in COMPARED:
        for a, b in zip(responses(ours, task), responses(theirs, task), strict=True):
            if task == "continue":
                assert a == b
            elif task == "pages":
                assert a == pytest.approx(b, rel=within)
            else:
                assert a[0] == pytest.approx(b[0], rel=within) and a[1] == b[1]
        numbers = {
            name: value for name, value in theirs["results"][task].items() if isinstance(value, float | int)
        }
        assert len(numbers) >= 2
        assert {name: ours["results"][task][name] for name in numbers} == pytest.approx(
            numbers, rel=10 * within
        )


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_results_equal_hf(batch_size: int, gpt2: Path, run: Callable, theirs: dict) -> None:
    """Results do not depend on the batch size. Some texts are longer than the context."""
    ours = run(MegatronLM(str(gpt2), device="cpu", batch_size=batch_size), COMPARED)
    assert_same_results(ours, theirs, within=1e-6)
    assert 0 < ours["results"]["last_word"]["acc,none"] < 1
    lengths = sorted(map(len, responses(ours, "continue")))
    assert lengths[0] < 10 and lengths[-1] > 20  # some reach a stop string


def test_native_checkpoint_equals_hf(gpt2, tmp_path: Path, run: Callable, theirs: dict) -> None:
    words = ["--from", "huggingface", "--to", "native", "--load", gpt2, "--save", tmp_path / "run"]
    convert_checkpoint.main([str(word) for word in words])
    assert_same_results(
        run(MegatronLM(str(tmp_path / "run"), device="cpu", batch_size=4), COMPARED), theirs, within=1e-6
    )


def test_tokenizer_with_bos_token(llama: Path, run: Callable) -> None:
    model = MegatronLM(str(llama), device="cpu", batch_size=4, add_bos_token=True)
    assert (
        model.tok_encode("the cat")
        == [IDS, *model.tokenizer.tokenize("the cat")]
        == model.tok_encode("<s>the cat")
    )
    assert_same_results(run(model, COMPARED), run(hf(llama), COMPARED), within=1e-5)


def test_samples_depend_only_on_the_seed(gpt2: Path, run: Callable) -> None:
    def draw(batch_size: int, seed: int) -> list[str]:
        model = MegatronLM(str(gpt2), device="cpu", batch_size=batch_size, seed=seed)
        return responses(run(model, ["draw"]), "draw")

    texts = draw(1, 1)
    assert len(texts) == 2 * SAMPLES and len(set(texts)) > SAMPLES
    assert draw(5, 1) == texts != draw(5, 2)


@pytest.fixture
def without_default_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not index lm_eval's own tasks, which takes ten seconds."""
    monkeypatch.setattr(harness, "TaskManager", functools.partial(TaskManager, include_defaults=False))


@pytest.mark.usefixtures("without_default_tasks")
def test_command_line(gpt2: Path, tasks: Path, theirs: dict, tmp_path: Path, capsys) -> None:
    words = ["--load", gpt2, "--include-path", tasks, "--batch-size", 4, "--device", "cpu"]
    file = tmp_path / "results.json"
    lm_eval_adapter.main([str(w) for w in (*words, "--tasks", "pages,last_w*", "--output", file)])
    written = json.loads(file.read_text())
    assert written["config"]["load"] == str(gpt2) and written["config"]["batch_size"] == 4
    results = written["results"]
    assert results.keys() == {"pages", "last_word"}
    for task, metric in (("pages", "byte_perplexity,none"), ("last_word", "perplexity,none")):
        assert results[task][metric] == pytest.approx(theirs["results"][task][metric], rel=1e-5)
    out = capsys.readouterr().out
    assert (
        "|byte_perplexity|" in out.replace(" ", "")
        and f"{results['pages']['byte_perplexity,none']:.4f}" in out
    )

    with pytest.raises(InputError, match=rf"^--tasks: nonesuch: no such task in lm_eval, nor in {tasks}$"):
        lm_eval_adapter.main([str(w) for w in (*words, "--tasks", "pages,nonesuch")])


@pytest.mark.usefixtures("without_default_tasks")
def test_missing_data_is_one_line(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "lost.yaml").write_text(f"task: lost\n{source(tmp_path / 'lost.json')}{TASKS['pages']}")
    with pytest.raises(InputError, match=r"^--tasks: the data is not available: .*lost\.json"):
        run_tasks(MegatronLM(str(gpt2), device="cpu"), ["lost"], tmp_path, None)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 4, "max_gen_toks": 5}, "generation_kwargs has num_beams 4; supported are until,"),
        (
            {"max_gen_toks": LENGTH},
            f"max_gen_toks {LENGTH} leaves no room .* in the model's context of {LENGTH} tokens",
        ),
        ({}, "max_gen_toks 256 leaves no room"),
        ({"max_gen_toks": 5, "temperature": -1.0, "do_sample": True}, "--temperature: -1.0 is too small"),
    ],
)
def test_invalid_generation_kwargs(kwargs: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sampling(kwargs, 1, LENGTH)


def test_generation_kwargs() -> None:
    config, until = sampling({"until": ["\n", ""], "max_gen_toks": 7, "temperature": 0.0}, 5, LENGTH)
    assert until == ["\n"] and config == SamplingConfig(out_seq_length=7, greedy=True, seed=5)
    config, until = sampling({"until": "x", "do_sample": True, "top_p": 0.9, "max_new_tokens": 7}, 5, LENGTH)
    assert until == ["x"] and config == SamplingConfig(out_seq_length=7, top_p=0.9, seed=5)


def test_context_of_spaces_is_empty(gpt2: Path) -> None:
    model = MegatronLM(str(gpt2), device="cpu")
    spaces = ("  ", "cat"), *model._encode_pair("  ", "cat")
    end = model.tokenizer.eod
    nothing = ("", "  cat"), [end], model.tok_encode("  cat")
    first, second = model._loglikelihood_tokens([spaces, nothing])
    assert first == second


@pytest.mark.parametrize("continuation", ["", "the " * LENGTH])
def test_invalid_continuations(gpt2: Path, continuation: str) -> None:
    model = MegatronLM(str(gpt2), device="cpu")
    request = ("the cat", continuation), *model._encode_pair("the cat", continuation)
    with pytest.raises(InputError, match=rf"^--tasks: .* must add 1 to {LENGTH}$"):
        model._loglikelihood_tokens([request])
