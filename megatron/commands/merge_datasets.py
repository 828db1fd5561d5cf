"""Merge the token files in a folder (NAME.bin and NAME.idx) into one pair, in the order of their names.

megatron merge --input my/parts --output-prefix my/corpus_text_document

If they are shards of one preparation (`megatron preprocess --shard I/N`), all N of them must be there, made from the
same inputs with the same tokenizer. Their prefix without -I-of-N may stand in place of the folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.preprocessing.merge import MergeConfig, merge
from megatron.tool import check_not_root, exit_on_sigterm


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, MergeConfig, "files")
    config = make_config(MergeConfig, vars(parser.parse_args(argv)))
    check_not_root("--output-prefix", config.output_prefix)
    exit_on_sigterm()
    merged = merge(config)
    files = merged.datasets
    documents, tokens = sum(len(d.doc_idx) - 1 for d in files), sum(d.num_tokens for d in files)
    source = f"{len(files):,} pairs of files"
    if merged.shards is not None:
        source = f"all {merged.shards:,} shards" + (
            f", {merged.bad:,} bad lines dropped" if merged.bad else ""
        )
    print(
        f"{config.output_prefix}: {documents:,} documents, {sum(map(len, files)):,} sequences, {tokens:,} tokens, "
        f"from {source}"
    )


if __name__ == "__main__":
    run_command(main)
