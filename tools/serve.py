"""Serve a trained GPT over HTTP: OpenAI's completions, NVIDIA's PUT /api, and a page to try it.

python tools/serve.py --load checkpoints
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import Parser, add_flags, make_config, run_command
from megatron.inference.config import InferenceConfig
from megatron.inference.lead import lead
from megatron.inference.server.config import ServerConfig
from megatron.tokenizer.config import TokenizerConfig


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    configs = {
        "model": InferenceConfig,
        "server": ServerConfig,
        "tokenizer (default: the one saved with the checkpoint)": TokenizerConfig,
    }
    for title, config in configs.items():
        add_flags(parser, config, title)
    args = vars(parser.parse_args(argv))
    model, server, tokenizer = (make_config(config, args) for config in configs.values())
    # Needs packages that nothing else does.
    from megatron.inference.server.run import listen, serve

    listener = None
    if os.environ.get("RANK", "0") == "0":
        server.api_key()
        listener = listen(server)  # before the model, which may take minutes to load
    else:
        # torchrun passes it on to all; what it ends is for the first process to say, which these must serve until then.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lead(model, tokenizer, functools.partial(serve, server, Path(model.load).resolve().name, listener))


if __name__ == "__main__":
    run_command(main)
