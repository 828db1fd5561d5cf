"""A server in the test's process and an HTTP client for it. Skips without their packages."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hf_models import VOCAB

httpx = pytest.importorskip("httpx", reason="needs pip install fastapi uvicorn httpx")
pytest.importorskip("fastapi", reason="needs pip install fastapi uvicorn httpx")
pytest.importorskip("uvicorn", reason="needs pip install fastapi uvicorn httpx")

from megatron.inference.batching import Batcher, Request, generate  # noqa: E402
from megatron.inference.config import InferenceConfig  # noqa: E402
from megatron.inference.load import load_gpt  # noqa: E402
from megatron.inference.predictor import Predictor  # noqa: E402
from megatron.inference.sampling import SamplingConfig  # noqa: E402
from megatron.inference.server.app import make_app  # noqa: E402
from megatron.inference.server.config import ServerConfig  # noqa: E402
from megatron.inference.server.engine import ServingEngine  # noqa: E402
from megatron.inference.server.run import listen, run  # noqa: E402
from megatron.parallel.mesh import Mesh  # noqa: E402
from megatron.tokenizer import Tokenizer  # noqa: E402
from megatron.tokenizer.config import TokenizerConfig  # noqa: E402

CPU = torch.device("cpu")
LENGTH = 64  # context length of the models
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3], [2, 7], [1, 8, 2, 8], [9] * 20]
# One client for all tests, since creating one takes time.
HTTP = httpx.Client(timeout=30)
# Tokenizer of the models in tests/hf_models.py.
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)


def load(folder: Path, tokenizer: TokenizerConfig = TOKENIZER) -> tuple[Predictor, Tokenizer]:
    """Load the model of a folder, without a KV cache yet."""
    model, chosen = load_gpt(InferenceConfig(load=str(folder)), tokenizer, Mesh(device=CPU))
    return Predictor([model], Mesh(device=CPU)), chosen


def load_slow(folder: Path, tokenizer: TokenizerConfig = TOKENIZER) -> tuple[Predictor, Tokenizer]:
    """Load a model with slow forward passes, so that clients can disconnect in the middle."""
    predictor, chosen = load(folder, tokenizer)
    forward = predictor.forward

    def slowly(*arguments: object, **options: object) -> torch.Tensor:
        time.sleep(0.03)
        return forward(*arguments, **options)

    predictor.forward = slowly
    return predictor, chosen


@contextmanager
def serving(
    predictor: Predictor,
    tokenizer: Tokenizer,
    *,
    other: tuple[Predictor, Tokenizer] | None = None,
    key: str | None = None,
    **flags: object,
) -> Iterator[tuple[str, ServingEngine]]:
    """Serve a model as "tiny" within a block; yields the address and the engine.

    Args:
        other: a second model, as "other".
        flags: fields of `ServerConfig`.
    """
    config = ServerConfig(**{"port": 0, "max_batch_size": 4} | flags)
    models = {"tiny": (predictor, tokenizer)} | ({} if other is None else {"other": other})
    for served, _ in models.values():
        served.reserve(config.max_batch_size, served.context)
    engine = ServingEngine(models, max_queue=config.max_queue)
    app, listener = make_app(engine, config, key=key), listen(config)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.listen()  # accept connections before the thread runs
    thread = threading.Thread(target=run, args=(engine, app, listener), kwargs={"greeting": url})
    thread.start()
    try:
        yield url, engine
    finally:
        engine.stop(0)
        thread.join()


def complete(url: str, **body: object) -> httpx.Response:
    return HTTP.post(f"{url}/v1/completions", json=body, timeout=30)


def events(response: httpx.Response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "condition not met within 10 s"
        time.sleep(0.005)


def words(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def expected_texts(model: tuple[Predictor, Tokenizer], rows: list[list[int]], **fields: object) -> list[str]:
    predictor, tokenizer = model
    predictor.reserve(4, LENGTH)
    sampling = SamplingConfig(**fields)
    return generate(Batcher(predictor, tokenizer), [Request(prompt=row, sampling=sampling) for row in rows])
