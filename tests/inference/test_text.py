"""Streamed text and the text of single tokens, with tokenizers whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers

from megatron.inference.batching import Request, SequenceState
from megatron.inference.sampling import SamplingConfig
from megatron.inference.server.nvidia import _segments
from megatron.inference.text import TextStream
from megatron.inference.token_text import TokenText
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.huggingface import HuggingFaceTokenizer

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
    assert (state.add(1, {EOD}), state.reason) == ("the ", "stop")


@pytest.fixture
def byte_fallback(tmp_path: Path) -> HuggingFaceTokenizer:
    """Tokenizer as Llama 2's: characters that it lacks are a token for each byte."""
    vocab = [("<unk>", 0.0), *((f"<0x{i:02X}>", -9.0) for i in range(256))]
    vocab += [(text, -1.0) for text in ("▁", "▁Once", "▁upon", "日", "O", "n")]
    tokenizer = HFTokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return HuggingFaceTokenizer(str(tmp_path))


def test_a_character_has_the_place_of_its_last_token(byte_fallback: HuggingFaceTokenizer) -> None:
    ids = byte_fallback.tokenize("Once日🎉 upon")
    assert len(ids) == 7  # four of them are the bytes of a character
    text = TokenText(byte_fallback, [])
    assert [text.add(token) for token in ids] == ["Once", "日", "", "", "", "🎉", " upon"]
    assert text.finish() == ""
    after = TokenText(byte_fallback, ids[:1])
    assert [after.name(token) for token in (*ids[:3], ids[6])] == [
        " Once",
        "日",
        f"token_id:{ids[2]}",
        " upon",
    ]
    after.add(ids[2])
    assert after.name(ids[3]) == f"token_id:{ids[3]}"


@pytest.mark.parametrize("text", ["Once日🎉 upon", "🎉 upon"])
@pytest.mark.parametrize("end", range(1, 8))
def test_segments_join_to_the_text(byte_fallback: HuggingFaceTokenizer, text: str, end: int) -> None:
    ids = byte_fallback.tokenize(text)[:end]
    assert "".join(_segments(ids, byte_fallback)) == byte_fallback.detokenize(ids)


@pytest.mark.parametrize("length", range(1, 6))
def test_a_prompt_may_end_in_characters_of_bytes(byte_fallback: HuggingFaceTokenizer, length: int) -> None:
    """Context that begins within one of them would make all of them invalid."""
    prompt = byte_fallback.tokenize("Once" + "🎉" * length)
    ids = byte_fallback.tokenize("Once" + "🎉" * length + "🎈 upon")[len(prompt) :]
    stream = TextStream(byte_fallback, prompt)
    assert [stream.add(token) for token in ids] == ["", "", "", "🎈", " upon"]


def test_a_text_that_begins_with_a_character_of_bytes(byte_fallback: HuggingFaceTokenizer) -> None:
    """The space before it, a token of its own, has no text."""
    text = TokenText(byte_fallback, [])
    added = [text.add(token) for token in byte_fallback.tokenize("🎉 upon")]
    assert added == ["", "", "", "", "🎉", " upon"]


def test_tokens_without_a_text_do_not_pile_up() -> None:
    class Silent(ByteTokenizer):
        def detokenize(self, ids: Sequence[int]) -> str:
            return super().detokenize([i for i in ids if i != 1])

    stream = TextStream(Silent(), [])
    assert [stream.add(1) for _ in range(100)] == [""] * 100
    assert len(stream.context) <= 10 and stream.add(ord("a")) == "a"


def test_special_tokens_have_a_text() -> None:
    class Named(ByteTokenizer):
        def detokenize(self, ids: Sequence[int]) -> str:
            return "".join("<end>" if i == EOD else chr(i) for i in ids)

    text = TokenText(Named(), [EOD])
    assert text.name(EOD) == "<end>" and [text.add(token) for token in (97, EOD, 98)] == ["a", "<end>", "b"]
