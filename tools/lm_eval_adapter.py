"""Run tasks of lm-evaluation-harness (pip install lm_eval==0.4.13) on a trained GPT.

python tools/lm_eval_adapter.py --load my/run --tasks lambada_openai,hellaswag --batch-size 16
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import Parser, add_flags, make_config, run_command
from megatron.flags import InputError
from megatron.tokenizer.config import TokenizerConfig


def main(argv: Sequence[str] | None = None) -> None:
    args = vars(make_parser().parse_args(argv))
    limit = check_limit(args["limit"])
    if args["batch_size"] < 1:
        raise InputError(f"--batch-size: {args['batch_size']} is too small; it must be at least 1")
    if args["include_path"] is not None and not args["include_path"].is_dir():
        raise InputError(f"--include-path: {args['include_path']} is not a folder")
    output = args["output_path"]
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise InputError(f"--output-path: {output} is not a file in a folder that is there")
    # It imports lm_eval, which need not be installed.
    from megatron.evaluation.harness import MegatronLM, run_tasks

    model = MegatronLM(
        args["load"],
        batch_size=args["batch_size"],
        device=args["device"],
        add_bos_token=args["add_bos_token"],
        tokenizer=make_config(TokenizerConfig, args),
    )
    if "bos" in model.tokenizer.special_ids and not args["add_bos_token"]:
        print(
            f"note: {model.tokenizer} has a beginning-of-sequence token; --add-bos-token begins each text with it, "
            "which the models of Llama's family were trained with",
            file=sys.stderr,
        )
    results, table = run_tasks(model, args["tasks"].split(","), args["include_path"], limit)
    print(table)
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def make_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="folder of checkpoints, or of a model of Hugging Face's"
    )
    parser.add_argument(
        "--tasks", required=True, metavar="NAME,...", help="tasks or groups of them, by name or pattern"
    )
    parser.add_argument(
        "--include-path", "--include_path", type=Path, metavar="DIR", help="folder of further tasks, as yaml"
    )
    parser.add_argument(
        "--batch-size", "--batch_size", type=int, default=1, metavar="N", help="texts computed together"
    )
    parser.add_argument(
        "--limit", type=float, metavar="N", help="take the first N samples of each task, or this fraction"
    )
    parser.add_argument(
        "--output-path", "--output_path", "--output", type=Path, metavar="FILE", help="JSON file to write"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    parser.add_argument(
        "--add-bos-token", action="store_true", help="begin each text with the beginning-of-sequence token"
    )
    add_flags(parser, TokenizerConfig, "tokenizer (default: the one saved with the checkpoint)")
    return parser


def check_limit(limit: float | None) -> float | None:
    """Raise `InputError` unless it is a number of samples, or a fraction of them."""
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit.is_integer())):
        raise InputError(f"--limit: {limit:g} is neither a whole number of samples nor a fraction of them")
    return limit


if __name__ == "__main__":
    run_command(main)
