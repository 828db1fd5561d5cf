"""Sentence splitting."""

from __future__ import annotations

import time

import pytest

from megatron.preprocessing.sentences import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One sentence."],
        ["No end"],
        ["First one.", "Second one!", "A third?", "Really?!", "Yes..."],
        ["Dr. Smith met Mrs. J. K. Rowling at 3 p.m. on Tuesday, vs. Capt. Ahab.", "They spoke."],
        ["It cost $3.50, i.e. nothing, at example.com.", "Visit it."],
        ['"Really?" she asked.', "“I think so.”", "(He did not.)", "Then they left."],
        ["See Fig. 3 and No. 5.", "No.", "It is so."],
        ["He lives in the U.S. and works.", "She does too."],
        ["今日は雨です。", "本当？", "「はい。」", "そう"],
        ["Wait... what?", "Nothing…", "Go on."],
        ["all in small letters, e.g. this.", "dr. smith is here.", "is it so?", "yes! , he said."],
    ],
)
def test_sentences(sentences):
    assert split_sentences(" ".join(sentences)) == sentences
    assert split_sentences("\n".join(sentences)) == sentences


def test_a_blank_line_ends_a_sentence():
    assert split_sentences("Title\n\nA line\nthat goes on. \n \n end") == [
        "Title",
        "A line\nthat goes on.",
        "end",
    ]


def test_newlines_are_kept_on_request():
    text = "One.  Two\nlines.\n\nThree\n\n\nFour. \n"
    parts = split_sentences(text, keep_newlines=True)
    assert parts == ["One.  ", "Two\nlines.\n\n", "Three\n\n\n", "Four. \n"]


@pytest.mark.parametrize("text", ["", " ", "\n\n \n"])
def test_no_sentence(text):
    assert split_sentences(text) == []
    assert split_sentences(text, keep_newlines=True) == []


@pytest.mark.parametrize("unit", [".", "\n", " ", "\n x", "a. ", "A.\n\n", "?!\"' ", ".\t"])
def test_time_is_linear_in_the_length(unit):
    start = time.monotonic()
    split_sentences(unit * 200_000)
    assert time.monotonic() - start < 10
