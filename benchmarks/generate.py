"""Compare generation speed with `transformers.generate`, for the same weights, prompts and number of tokens.

    python benchmarks/generate.py [--sizes small ...] [--precisions fp32 bf16] [--batches 1 32] [--device cuda]

Each implementation runs in its own process with the same number of threads and decodes greedily. The prompts of a batch
differ in length; transformers gets them padded on the left. Rounds of the two alternate, so both run under the same
load of the machine. Ratios are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import run_metadata
from parallel_workers import Workers

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.inference.batching import Batcher, Request, generate
from megatron.inference.config import InferenceConfig
from megatron.inference.load import DTYPES, load_gpt
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.parallel.mesh import Mesh, choose_device
from megatron.tokenizer.config import TokenizerConfig

# Layers, hidden size, heads, vocabulary.
SIZES = {"small": (6, 512, 8, 8192), "124m": (12, 768, 12, 50257), "355m": (24, 1024, 16, 50257)}
CONTEXT, THREADS = 1024, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    device: str = flag("cpu", "device to measure", choices=("cpu", "cuda"))
    sizes: tuple[str, ...] = flag(("small", "124m"), "models to measure", choices=tuple(SIZES), nargs="+")
    precisions: tuple[str, ...] = flag(
        ("fp32", "bf16"), "precisions to measure", choices=("fp32", "bf16"), nargs="+"
    )
    batches: tuple[int, ...] = flag((1, 32), "batch sizes to measure", nargs="+", low=1)
    prompt: int = flag(128, "length of the longest prompt in tokens; the shortest is half as long", low=2)
    new: int = flag(128, "tokens to generate per prompt", low=1)
    rounds: int = flag(5, "measured rounds per implementation", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/generate.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("generate.py", argv)
    for size in config.sizes:
        for precision in config.precisions:
            with tempfile.TemporaryDirectory() as folder:
                save_model(folder, size, precision)
                for batch in config.batches:
                    name = f"{size}, {precision}, {batch} at once, {config.device}"
                    results[name] = compare(config, folder, precision, batch)
                    print(f"{name}: {json.dumps(results[name])}", flush=True)
                    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def compare(config: BenchmarkConfig, folder: str, precision: str, batch: int) -> dict[str, float]:
    """Return tokens per second of both implementations, and the ratio of ours to transformers."""
    sides = {
        name: Workers(measure, 1, config, folder, precision, batch, threads=THREADS)
        for name, measure in (("ours", ours), ("transformers", baseline))
    }
    try:
        rounds = [{name: run.next()[0] for name, run in sides.items()} for _ in range(config.rounds + 1)][1:]
    finally:
        for run in sides.values():
            run.__exit__()
    tokens = batch * config.new
    return {
        **{
            f"{name}, tokens/s": round(tokens / statistics.median(r[name][0] for r in rounds), 1)
            for name in sides
        },
        "ours over theirs": round(statistics.median(r["transformers"][0] / r["ours"][0] for r in rounds), 2),
        "texts that are the same": sum(
            a == b for a, b in zip(*(rounds[0][name][1] for name in sides), strict=True)
        ),
    }


def save_model(folder: str, size: str, precision: str) -> None:
    """Save a GPT-2 with random weights."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    layers, hidden, heads, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).to(DTYPES[precision]).save_pretrained(folder)


def prompts(config: BenchmarkConfig, vocabulary: int, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(config.prompt, config.prompt // 2, batch).round().int().tolist()
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def ours(
    config: BenchmarkConfig, folder: str, precision: str, batch: int
) -> Iterator[tuple[float, list[list[int]]]]:
    """Generate with our predictor. Yields seconds and the generated tokens of each round."""
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    mesh = Mesh(device=choose_device(config.device))
    tokenizer_config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocabulary - 1)
    model, tokenizer = load_gpt(InferenceConfig(load=folder, dtype=precision), tokenizer_config, mesh)
    predictor = Predictor([model], mesh)
    predictor.reserve(batch, config.prompt + config.new)
    sampling = SamplingConfig(greedy=True, out_seq_length=config.new)
    requests = [Request(prompt=prompt, sampling=sampling) for prompt in prompts(config, vocabulary, batch)]
    while True:
        begin = time.perf_counter()
        texts = generate(Batcher(predictor, tokenizer), requests)
        yield time.perf_counter() - begin, [[int(word) for word in text.split()] for text in texts]


def baseline(
    config: BenchmarkConfig, folder: str, precision: str, batch: int
) -> Iterator[tuple[float, list[list[int]]]]:
    """Generate with transformers. Yields seconds and the generated tokens of each round."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision])
    model = model.to(config.device).eval()
    rows = prompts(config, model.config.vocab_size, batch)
    length = max(map(len, rows))
    tokens = torch.tensor([[0] * (length - len(row)) + row for row in rows], device=config.device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=config.device)
    while True:
        begin = time.perf_counter()
        out = model.generate(
            tokens,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=config.new,
            max_new_tokens=config.new,
            pad_token_id=0,
        )
        new = out[:, length:].tolist()
        yield time.perf_counter() - begin, new


if __name__ == "__main__":
    run_command(main)
