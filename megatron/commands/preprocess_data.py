"""Tokenize text into the files (.bin and .idx) that training reads.

    megatron preprocess --input my/texts --output-prefix my/corpus --append-eod --tokenizer my/tokenizer

A copy of the tokenizer is kept beside the files, and training uses it unless it gets other flags.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.preprocessing.preprocess import PreprocessConfig, Report, preprocess
from megatron.settings.tokenizer import TokenizerFlags, tokenizer_config
from megatron.tool import check_not_root, exit_on_sigterm

SHORT_DOCUMENT = 32  # tokens on average, below which a warning is printed


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, PreprocessConfig, "data")
    add_flags(parser, TokenizerFlags, "tokenizer")
    args = vars(parser.parse_args(argv))
    config = make_config(PreprocessConfig, args)
    check_not_root("--output-prefix", config.output_prefix)
    tokenizer = tokenizer_config(args)
    if (tokenizer.tokenizer_type or "").startswith("Bert") and not config.split_sentences:
        print("note: BERT is pretrained on sentences; use --split-sentences", file=sys.stderr)
    exit_on_sigterm()
    describe(preprocess(config, tokenizer), config.split_sentences)


def describe(report: Report, split_sentences: bool) -> None:
    for output in report.outputs:
        print(
            f"{output.prefix}: {output.documents:,} documents, {output.sequences:,} sequences, "
            f"{output.tokens:,} tokens"
        )
        if output.documents < report.documents:
            print(f"  {report.documents - output.documents:,} documents without tokens were dropped")
    if report.bad_count:
        print(f"{report.bad_count:,} bad lines were dropped, the first of them:")
        for line in report.bad_lines:
            print(f"  {line}")
    for output in report.outputs:
        mean = output.tokens / max(output.documents, 1)
        if not split_sentences and output.documents > 1 and mean < SHORT_DOCUMENT:
            print(
                f"warning: {output.prefix}: documents have {mean:.0f} tokens on average; if they are lines or "
                "paragraphs of longer texts, a model learns little of what connects them: make each text one document",
                file=sys.stderr,
            )
    speed = report.text_bytes / 1e6 / report.seconds
    print(f"{report.text_bytes / 1e6:.1f} MB of text in {report.seconds:.1f} s, {speed:.1f} MB/s")


if __name__ == "__main__":
    run_command(main)
