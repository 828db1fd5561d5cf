"""Streamed text, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.inference.batching import Request, SequenceState
from megatron.inference.sampling import SamplingConfig
from megatron.inference.text import TextStream
from megatron.tokenizer.base import Tokenizer

EOD = 256
TEXT = "Ünïcödé, 中文 and 🎉\n\nthe end of it"


class ByteTokenizer(Tokenizer):
    def __init__(self) -> None:
        super().__init__("Bytes", files=[], vocab_size=257, special_ids={"eod": EOD})

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def pieces(text: bytes, stops: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(ByteTokenizer(), list(b"a prompt "), stops)
    found = []
    for byte in text:
        found.append(stream.add(byte))
        if stream.stopped:
            break
    return [*found, stream.finish()], stream


def test_characters_are_not_split() -> None:
    found, _ = pieces(TEXT.encode())
    assert "".join(found) == TEXT
    assert not any("\ufffd" in piece for piece in found)
    assert sum(map(bool, found)) == len(TEXT)


@pytest.mark.parametrize("length", range(1, 5))
def test_invalid_utf8_is_replaced(length: int) -> None:
    found, _ = pieces(b"ab" + b"\xff" * length)
    assert "".join(found) == "ab" + "\ufffd" * length
    cut, _ = pieces("ab🎉".encode()[:-1])
    assert "".join(cut) == "ab\ufffd"


@pytest.mark.parametrize("stop", ["\n\n", "the", "文 a", "🎉", "it", "Ü"])
def test_stop_strings_are_removed(stop: str) -> None:
    found, stream = pieces(TEXT.encode(), ["never", stop])
    assert stream.stopped and "".join(found) == TEXT.split(stop)[0]


def test_prefix_of_a_stop_string_is_held_back() -> None:
    found, stream = pieces(b"aabaabaaa", ["aabaac", "zz"])
    assert not stream.stopped and "".join(found) == "aabaabaaa"
    assert found[:5] == [""] * 5


def test_special_tokens_are_skipped() -> None:
    stream = TextStream(ByteTokenizer(), [EOD], [])
    assert [stream.add(token) for token in (97, EOD, 98)] == ["a", "", "b"]


def test_stop_string_in_the_last_token() -> None:
    """The token also starts a character, which stays incomplete."""

    class WordTokenizer(ByteTokenizer):
        def detokenize(self, ids: Sequence[int]) -> str:
            return b"".join([b"a ", b"the end\xf0"][i] for i in ids).decode("utf-8", errors="replace")

    request = Request(prompt=[0], sampling=SamplingConfig(out_seq_length=1), stops=["end"])
    state = SequenceState(request, WordTokenizer(), max_length=9)
    assert (state.add(1, EOD), state.reason) == ("the ", "stop")
