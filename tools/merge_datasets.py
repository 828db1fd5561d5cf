r"""Merge the token files of a folder (NAME.bin and NAME.idx), in the order of their names, into one pair.

python tools/merge_datasets.py --input my/parts --output-prefix my/corpus_text_document
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import Parser, add_flags, end_on_sigterm, make_config, run_command
from megatron.data.merge import MergeConfig, merge


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, MergeConfig, "files")
    config = make_config(MergeConfig, vars(parser.parse_args(argv)))
    end_on_sigterm()
    merged = merge(config)
    documents, tokens = sum(len(d.doc_idx) - 1 for d in merged), sum(d.num_tokens for d in merged)
    print(
        f"{config.output_prefix}: {documents:,} documents, {sum(map(len, merged)):,} sequences, {tokens:,} tokens, of "
        f"{len(merged):,} pairs of files"
    )


if __name__ == "__main__":
    run_command(main)
