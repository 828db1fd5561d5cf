"""Preprocessing text into token files: equality with Megatron-LM's files, output and errors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.preprocessing import batch_encoder
from megatron.preprocessing import preprocess as module
from megatron.preprocessing.batch_encoder import BatchEncoder, EncoderSettings
from megatron.preprocessing.documents import read_batches
from megatron.preprocessing.preprocess import PreprocessConfig, preprocess
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig

NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Documents whose text is token ids; the second and the last are empty."""
    path = tmp_path / "numbers.jsonl"
    texts = ["1 2 3", "", "4", " ".join(map(str, range(1000))), " \n "]
    path.write_text("".join(json.dumps({"text": t, "other": f"{n}"}) + "\n" for n, t in enumerate(texts)))
    return path


def config(*inputs: Path, output: Path, **flags: object) -> PreprocessConfig:
    return PreprocessConfig(input=tuple(map(str, inputs)), output_prefix=str(output), workers=1, **flags)


def sequences(prefix: str | Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.get(i).tolist() for i in range(len(dataset))]


def same_files(prefix: str | Path, reference: Path) -> bool:
    return all(
        Path(f"{prefix}.{kind}").read_bytes() == Path(f"{reference}.{kind}").read_bytes()
        for kind in ("bin", "idx")
    )


# Comparison with Megatron-LM


@pytest.mark.parametrize(
    ("vocabulary", "reference"),
    [
        ("gpt2", "owt60_gpt2_append_eod_text_document"),
        ("gpt2-tiny", "gpt-v2.5/tiny60_text_document"),
    ],
)
def test_writes_the_bytes_of_megatron_for_gpt(vocabulary, reference, shared, tmp_path):
    tokenizer = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(shared / f"data/{vocabulary}-vocab.json"),
        merge_file=str(shared / f"data/{vocabulary}-merges.txt"),
    )
    report = preprocess(
        config(shared / "vectors/owt60.jsonl", output=tmp_path / "o", append_eod=True), tokenizer
    )
    assert same_files(tmp_path / "o_text_document", shared / "vectors" / reference)
    assert (report.documents, report.bad_count, report.outputs[0].documents) == (60, 0, 60)


def bert_settings(shared: Path) -> EncoderSettings:
    tokenizer = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=str(shared / "data/bert-base-uncased-vocab.txt"),
    )
    return EncoderSettings(
        tokenizer, "tokenize_batch", ("text",), split_sentences=True, keep_newlines=False, eod=None
    )


def test_writes_the_bytes_of_megatron_for_bert(shared, tmp_path, monkeypatch):
    """The reference was made with this simple sentence splitter."""
    monkeypatch.setattr(batch_encoder, "split_sentences", lambda text, **_: re.split(r"(?<=[.!?])\s+", text))
    encode = BatchEncoder(bert_settings(shared))
    with IndexedDatasetWriter(tmp_path / "o", np.uint16) as writer:
        for batch in read_batches([str(shared / "vectors/owt60.jsonl")], ["text"]):
            writer.add_documents(*encode(batch).tokens[0])
    assert same_files(tmp_path / "o", shared / "vectors/bert-v2.5/bert60_text_sentence")


def test_splits_the_text_of_megatrons_bert_file_into_sentences(shared):
    (batch,) = read_batches([str(shared / "vectors/owt60.jsonl")], ["text"])
    ours = BatchEncoder(bert_settings(shared))(batch).tokens[0]
    theirs = IndexedDataset(shared / "vectors/bert-v2.5/bert60_text_sentence")
    assert ours.tokens.tolist() == np.concatenate([theirs.get(i) for i in range(len(theirs))]).tolist()
    assert len(ours.sequences_per_document) == 60
    # Most of its boundaries are ours, too, except for abbreviations and the like; ours also splits at headings.
    boundaries = [set(np.cumsum(sizes).tolist()) for sizes in (ours.sequence_sizes, theirs.sizes)]
    assert len(boundaries[0] & boundaries[1]) > 0.85 * len(boundaries[1])


# Output


def test_documents_without_tokens_are_dropped_and_counted(numbers, tmp_path):
    report = preprocess(config(numbers, output=tmp_path / "o"), NULL)
    assert sequences(tmp_path / "o_text_document") == [[1, 2, 3], [4], list(range(1000))]
    assert IndexedDataset(tmp_path / "o_text_document").doc_idx.tolist() == [0, 1, 2, 3]
    assert (report.documents, report.outputs[0].documents, report.outputs[0].tokens) == (5, 3, 1004)


def test_end_of_document_token(numbers, tmp_path):
    preprocess(config(numbers, output=tmp_path / "o", append_eod=True), NULL)
    assert sequences(tmp_path / "o_text_document") == [[1, 2, 3, 1000], [4, 1000], [*range(1000), 1000]]


def test_each_key_has_its_files(numbers, tmp_path):
    report = preprocess(config(numbers, output=tmp_path / "o", json_keys=("text", "other")), NULL)
    assert len(sequences(tmp_path / "o_text_document")) == 3
    assert sequences(tmp_path / "o_other_document") == [[0], [1], [2], [3], [4]]
    assert [o.documents for o in report.outputs] == [3, 5]


def test_sentences_are_sequences_and_the_last_ends_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_encoder, "split_sentences", lambda text, **_: text.split("."))
    settings = EncoderSettings(NULL, "tokenize_batch", ("text",), True, False, eod=1000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("1 2. .3.", ".", "", "4")))
    (batch,) = read_batches([str(path)], ["text"])
    tokens = BatchEncoder(settings)(batch).tokens[0]
    assert tokens.tokens.tolist() == [1, 2, 3, 1000, 4, 1000]
    assert tokens.sequence_sizes.tolist() == [2, 2, 2]
    assert tokens.sequences_per_document.tolist() == [2, 1]


def test_newlines_stay_with_their_sentence(tmp_path, shared):
    files = {"vocab_file": "data/gpt2-vocab.json", "merge_file": "data/gpt2-merges.txt"}
    tokenizer = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", **{k: str(shared / v) for k, v in files.items()}
    )
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "One.\n\nTwo.  Three."}) + "\n")
    flags = {"split_sentences": True, "keep_newlines": True}
    preprocess(config(path, output=tmp_path / "o", **flags), tokenizer)
    gpt2 = build_tokenizer(tokenizer)
    texts = [gpt2.detokenize(ids) for ids in sequences(tmp_path / "o_text_sentence")]
    assert texts == ["One.\n\n", "Two.  ", "Three."]


def test_large_ids_are_stored_as_int32(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0 65535 65536 99999\n")
    preprocess(
        config(path, output=tmp_path / "o"),
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100_000),
    )
    assert IndexedDataset(tmp_path / "o_text_document").dtype == np.int32
    assert sequences(tmp_path / "o_text_document") == [[0, 65535, 65536, 99999]]


def test_many_batches_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.preprocessing.blocks.BATCH_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(1000)))
    two = PreprocessConfig(input=(str(path),), output_prefix=str(tmp_path / "o"), workers=2)
    preprocess(two, NULL)
    assert sequences(tmp_path / "o_text_document") == [[i] for i in range(1000)]


def test_files_do_not_depend_on_the_batches(shared, tmp_path, monkeypatch):
    tokenizer = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=str(shared / "data/bert-base-uncased-vocab.txt"),
    )
    source = shared / "vectors/owt60.jsonl"
    preprocess(config(source, output=tmp_path / "one", split_sentences=True), tokenizer)
    monkeypatch.setattr("megatron.preprocessing.blocks.BATCH_BYTES", 10_000)
    preprocess(config(source, output=tmp_path / "many", split_sentences=True), tokenizer)
    assert same_files(tmp_path / "one_text_sentence", tmp_path / "many_text_sentence")


# Errors


def test_a_bad_line_stops_or_is_listed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": \n{"text": "3"}\n' + "bad\n" * 20)
    with pytest.raises(InputError, match=rf"{path}:2: is not JSON.* \(--on-bad-line skip skips"):
        preprocess(config(path, output=tmp_path / "o"), NULL)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]

    report = preprocess(config(path, output=tmp_path / "o", on_bad_line="skip"), NULL)
    assert sequences(tmp_path / "o_text_document") == [[1, 2], [3]]
    assert (report.documents, report.bad_count) == (2, 21)
    places = [line.split(": ")[0] for line in report.bad_lines]
    assert places == [f"{path}:{number}" for number in (2, *range(4, 13))]


def test_a_text_that_the_tokenizer_rejects_is_a_bad_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": "4 1001"}\n{"text": "3"}\n')
    report = preprocess(config(path, output=tmp_path / "o", on_bad_line="skip"), NULL)
    assert sequences(tmp_path / "o_text_document") == [[1, 2], [3]]
    assert report.bad_lines == [f"{path}:2: '1001' is not a token id; NullTokenizer accepts 0 to 1000"]


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_input_without_text(content, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=f"--input: {path} has no text for {tmp_path}/o_text_document"):
        preprocess(config(path, output=tmp_path / "o"), NULL)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_wrong_flags(numbers, tmp_path):
    with pytest.raises(InputError, match="--input is required"):
        preprocess(PreprocessConfig(output_prefix="o"), NULL)
    with pytest.raises(InputError, match="--output-prefix is required"):
        preprocess(PreprocessConfig(input=("a",)), NULL)
    with pytest.raises(InputError, match="--json-keys: text text has a duplicate key"):
        preprocess(config(numbers, output=tmp_path / "o", json_keys=("text", "text")), NULL)
    with pytest.raises(InputError, match="--keep-newlines: requires --split-sentences"):
        preprocess(config(numbers, output=tmp_path / "o", keep_newlines=True), NULL)
    with pytest.raises(InputError, match="--lang: 'klingon' is not one of english"):
        config(numbers, output=tmp_path / "o", lang="klingon")
    with pytest.raises(InputError, match="--dataset-impl: 'lazy' is not one of mmap"):
        config(numbers, output=tmp_path / "o", dataset_impl="lazy")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--output-prefix: the directory .*/file/x cannot be created"):
        preprocess(config(numbers, output=tmp_path / "file/x/o"), NULL)
    bert = tmp_path / "vocab.txt"
    bert.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    with pytest.raises(InputError, match=r"BertWordPieceCase .* has no end-of-document token"):
        preprocess(
            config(numbers, output=tmp_path / "o", append_eod=True),
            TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(bert)),
        )


def test_complete_files_are_replaced_only_by_complete_files(numbers, tmp_path):
    preprocess(config(numbers, output=tmp_path / "new/folder/o"), NULL)
    before = sequences(tmp_path / "new/folder/o_text_document")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "7"}\n' * 10 + "bad\n")
    with pytest.raises(InputError, match=r"bad.jsonl:11: "):
        preprocess(config(bad, output=tmp_path / "new/folder/o"), NULL)
    assert sequences(tmp_path / "new/folder/o_text_document") == before
    assert sorted(os.listdir(tmp_path / "new/folder")) == [
        f"o_text_document.{end}" for end in ("bin", "idx", "tokenizer")
    ]
    preprocess(config(bad, output=tmp_path / "new/folder/o", on_bad_line="skip"), NULL)
    assert sequences(tmp_path / "new/folder/o_text_document") == [[7]] * 10


def test_the_encoder_is_chosen_on_the_beginning_of_a_large_document(tmp_path, monkeypatch):
    """Comparing encoders on all of it would take several times its size in memory."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("1 2", "3 " * 10_000, "4")))
    samples: list[list[str]] = []
    monkeypatch.setattr(module, "SAMPLE_CHARACTERS", 100)
    monkeypatch.setattr(
        module,
        "choose_engine",
        lambda tokenizer, sample: samples.append(sample) or ("tokenize_batch", "the only one"),
    )
    preprocess(config(path, output=tmp_path / "o"), NULL)
    assert samples == [["1 2", ("3 " * 50)[:97]]]
    assert len(sequences(tmp_path / "o_text_document")[1]) == 10_000
