"""Run tasks of lm-evaluation-harness (pip install lm_eval==0.4.13) on a trained GPT.

python tools/lm_eval_adapter.py --load my/run --tasks lambada_openai,hellaswag --batch-size 16
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.tokenizer.config import TokenizerConfig
from megatron.tool import check_output_file, write_output_file


def main(argv: Sequence[str] | None = None) -> None:
    args = vars(make_parser().parse_args(argv))
    limit = check_limit(args["limit"])
    if args["batch_size"] < 1:
        raise InputError(f"--batch-size: {args['batch_size']} is too small; it must be at least 1")
    if args["include_path"] is not None and not args["include_path"].is_dir():
        raise InputError(f"--include-path: {args['include_path']} is not a folder")
    output = args["output_path"]
    check_output_file("--output-path", output)
    # Imported here because it imports lm_eval, which is an optional package.
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
            f"note: {model.tokenizer} has a beginning-of-sequence token; models of the Llama family need it at the "
            "start of each text (--add-bos-token)",
            file=sys.stderr,
        )
    results, table = run_tasks(model, args["tasks"].split(","), args["include_path"], limit)
    print(table)
    if output is not None:
        write_output_file("--output-path", output, json.dumps(results, indent=2) + "\n")


def make_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="folder of checkpoints, or of a Hugging Face model"
    )
    parser.add_argument(
        "--tasks", required=True, metavar="NAME,...", help="tasks or groups of tasks, by name or pattern"
    )
    parser.add_argument(
        "--include-path", "--include_path", type=Path, metavar="DIR", help="folder of further tasks, in YAML"
    )
    parser.add_argument(
        "--batch-size", "--batch_size", type=int, default=1, metavar="N", help="number of texts in a batch"
    )
    parser.add_argument(
        "--limit", type=float, metavar="N", help="use the first N samples of each task, or this fraction"
    )
    parser.add_argument(
        "--output-path", "--output_path", "--output", type=Path, metavar="FILE", help="JSON file to write"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="device to run on")
    parser.add_argument(
        "--add-bos-token", action="store_true", help="start each text with the beginning-of-sequence token"
    )
    add_flags(parser, TokenizerConfig, "tokenizer (default: the one saved with the checkpoint)")
    return parser


def check_limit(limit: float | None) -> float | None:
    """Raise `InputError` unless it is an integer or a fraction below 1."""
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit.is_integer())):
        raise InputError(f"--limit: {limit:g} is neither an integer nor a fraction below 1")
    return limit


if __name__ == "__main__":
    run_command(main)
