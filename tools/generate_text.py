"""Continue a prompt with a trained GPT.

python tools/generate_text.py --load checkpoints --prompt "Once upon a time"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import Parser, add_flags, make_config, run_command
from megatron.inference.config import InferenceConfig
from megatron.inference.generate import SamplingConfig, generate
from megatron.inference.load import load_gpt
from megatron.parallel.mesh import Mesh, choose_device
from megatron.tokenizer.config import TokenizerConfig


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    add_flags(parser, InferenceConfig, "model")
    add_flags(parser, SamplingConfig, "sampling")
    add_flags(parser, TokenizerConfig, "tokenizer (default: the one saved with the checkpoint)")
    args = vars(parser.parse_args(argv))

    sampling, chosen = make_config(SamplingConfig, args), make_config(TokenizerConfig, args)
    config = make_config(InferenceConfig, args)
    model, tokenizer = load_gpt(config, chosen, Mesh(device=choose_device(config.device)))
    context = model.config.max_position_embeddings
    prompt = tokenizer.tokenize(args["prompt"])
    tokens: list[int] = []
    shown = ""
    for token in generate(model, prompt, sampling, tokenizer.special_ids.get("eod")):
        if not tokens:
            sys.stdout.write(args["prompt"])
        tokens.append(token)
        text = tokenizer.detokenize(prompt + tokens)[len(tokenizer.detokenize(prompt)) :]
        # A character can take several tokens; until it is whole it decodes to the replacement character.
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()
    if len(prompt) + len(tokens) == context and len(tokens) < sampling.out_seq_length:
        print(
            f"note: ended after {len(tokens)} of {sampling.out_seq_length} tokens: with the prompt's {len(prompt)} "
            f"they fill the {context} that the model sees",
            file=sys.stderr,
        )


if __name__ == "__main__":
    run_command(main)
