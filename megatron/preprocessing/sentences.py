"""Sentence splitting by rules for English and other languages whose sentences end with . ! ? or 。！？"""

from __future__ import annotations

import re

# A period after these does not end a sentence, because a name or number usually follows. "No" is handled separately.
ABBREVIATIONS = frozenset(
    "adm al approx apr aug ave ca capt cf cmdr co col corp dec dept dr ed eds eg esp est feb fig figs fr gen gov "
    "hon ie inc jan jr jul jun lt ltd maj mar messrs mr mrs ms mt nos nov oct op pp pres prof pt rep rev sen sep "
    "sept sgt sr st ste vol vols vs".split()
)
STOP = re.compile(r"([.!?…。！？])[.!?…。！？]*[\"'”’»)\]」』）]*")
BLANK_LINE = re.compile(r"\n\s*\n")
SPACE = re.compile(r"\s*")
CONTINUATION = re.compile(r"\s+[\"'“‘«(\[]*[a-z,;:]")
CONTINUATION_WITHOUT_CAPITALS = re.compile(r"\s+[\"'“‘«(\[]*[,;:]")
NUMBER = re.compile(r"\s+\d")
LAST_WORD = re.compile(r"(\w[\w.]*)\.$")
LONGEST_ABBREVIATION = 16  # characters, with dots between them


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Split `text` into non-empty sentences.

    A blank line also ends a sentence. A lowercase letter continues a sentence, unless the text has no capitals.

    Args:
        keep_newlines: keep the whitespace around a sentence.
    """
    continuation = CONTINUATION if text != text.lower() else CONTINUATION_WITHOUT_CAPITALS
    ends = {match.end() for match in STOP.finditer(text) if _ends_sentence(text, match, continuation)}
    ends.update(match.start() for match in BLANK_LINE.finditer(text))
    sentences = []
    start = 0
    for end in [*sorted(ends), len(text)]:
        space = SPACE.match(text, end)
        assert space is not None  # it matches the empty string
        end = space.end()
        sentence = text[start:end]
        if sentence.strip():
            sentences.append(sentence if keep_newlines else sentence.strip())
            start = end
    return sentences


def _ends_sentence(text: str, stop: re.Match[str], continuation: re.Pattern[str]) -> bool:
    sign, end = stop.group(1), stop.end()
    if sign in "。！？":
        return True  # Chinese and Japanese put no space after it
    if not text[end : end + 1].isspace() or continuation.match(text, end):
        return False
    if sign != ".":
        return True
    word = LAST_WORD.search(text, max(0, stop.start() - LONGEST_ABBREVIATION), stop.start() + 1)
    if word is None:
        return True
    name = word.group(1)
    if name in ("No", "no"):  # an abbreviation only before a number
        return not NUMBER.match(text, end)
    is_initial = len(name) == 1 and name.isupper()
    return not is_initial and name.lower().replace(".", "") not in ABBREVIATIONS
