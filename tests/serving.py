"""A server in the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hf_models import VOCAB

from megatron.inference.config import InferenceConfig
from megatron.inference.load import load_gpt
from megatron.inference.predictor import Predictor
from megatron.inference.server.app import make_app
from megatron.inference.server.config import ServerConfig
from megatron.inference.server.engine import Engine
from megatron.inference.server.run import listen, run
from megatron.parallel.mesh import Mesh
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

CPU = torch.device("cpu")
# Of tests/hf_models.py's models.
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)


def load(folder: Path, tokenizer: TokenizerConfig = TOKENIZER) -> tuple[Predictor, Tokenizer]:
    """The model of a folder, without room for texts yet."""
    model, chosen = load_gpt(InferenceConfig(load=str(folder)), tokenizer, Mesh(device=CPU))
    return Predictor(model, Mesh(device=CPU)), chosen


@contextmanager
def serving(
    predictor: Predictor, tokenizer: Tokenizer, *, key: str | None = None, **flags: object
) -> Iterator[tuple[str, Engine]]:
    """A block in which a model is served as "tiny", with these values of fields of `ServerConfig`; gives the address."""
    config = ServerConfig(**{"port": 0, "max_batch_size": 4} | flags)
    predictor.reserve(config.max_batch_size, predictor.context)
    engine = Engine(predictor, tokenizer, max_queue=config.max_queue)
    app, listener = make_app(engine, config, model="tiny", key=key), listen(config)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=run, args=(engine, app, listener), kwargs={"greeting": url})
    thread.start()
    try:
        yield url, engine
    finally:
        engine.stop(0)
        thread.join()
