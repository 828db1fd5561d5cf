"""Merge the token files in a folder (NAME.bin and NAME.idx) into one pair, in the order of their names.

megatron merge --input my/parts --output-prefix my/corpus_text_document
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.preprocessing.merge import MergeConfig, merge
from megatron.tool import exit_on_sigterm


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, MergeConfig, "files")
    config = make_config(MergeConfig, vars(parser.parse_args(argv)))
    exit_on_sigterm()
    merged = merge(config)
    documents, tokens = sum(len(d.doc_idx) - 1 for d in merged), sum(d.num_tokens for d in merged)
    print(
        f"{config.output_prefix}: {documents:,} documents, {sum(map(len, merged)):,} sequences, {tokens:,} tokens, "
        f"from {len(merged):,} pairs of files"
    )


if __name__ == "__main__":
    run_command(main)
