"""Detokenizer of WikiText, with the rules behind the published perplexities."""

from __future__ import annotations

import re

BEFORE = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
AFTER = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Remove WikiText's spaces around punctuation and within brackets and quotes."""
    for old, new in BEFORE:
        text = text.replace(old, new)
    for left, right in PAIRS:
        begin, end = re.escape(left), re.escape(right)
        text = re.sub(rf"{begin}\s*([^{end}]*?)\s*{end}", rf"{left}\1{right}", text)
    for old, new in AFTER:
        text = text.replace(old, new)
    return text
