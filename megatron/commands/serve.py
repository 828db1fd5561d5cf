"""Serve a trained GPT over HTTP: OpenAI's completions API, NVIDIA's PUT /api, and a web page.

megatron serve --load checkpoints
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import driver
from megatron.inference.predictor import Predictor
from megatron.inference.server.config import ServerConfig
from megatron.settings.tokenizer import TokenizerFlags, tokenizer_config
from megatron.tokenizer import Tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    configs = {
        "model": InferenceConfig,
        "server": ServerConfig,
        "tokenizer (default: the one saved with the checkpoint)": TokenizerFlags,
    }
    for title, config in configs.items():
        add_flags(parser, config, title)
    args = vars(parser.parse_args(argv))
    model, server = make_config(InferenceConfig, args), make_config(ServerConfig, args)
    # Imported here because it needs packages that nothing else does.
    from megatron.inference.server.run import listen, serve

    listener = None
    if os.environ.get("RANK", "0") == "0":
        server.api_key()
        listener = listen(server)  # before the model, which may take minutes to load
    else:
        # torchrun sends SIGTERM to all ranks. Rank 0 shuts the server down, and the others work for it until then.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def run(predictor: Predictor, tokenizer: Tokenizer) -> None:
        assert listener is not None  # only rank 0 calls this
        serve(server, Path(model.load).resolve().name, listener, predictor, tokenizer)

    driver(model, tokenizer_config(args), run)


if __name__ == "__main__":
    run_command(main)
