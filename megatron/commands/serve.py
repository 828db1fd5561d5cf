"""Serve a trained GPT over HTTP: OpenAI's completions and chat API, NVIDIA's PUT /api, and a web page.

megatron serve --load checkpoints
megatron serve --load my/run --compare my/other/run    two models, side by side on the page
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import drive_all
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

    served = server.models(model)

    def run(models: list[tuple[Predictor, Tokenizer]]) -> None:
        assert listener is not None  # only rank 0 calls this
        serve(server, listener, dict(zip(served, models, strict=True)))

    drive_all(list(served.values()), tokenizer_config(args), run)


if __name__ == "__main__":
    run_command(main)
