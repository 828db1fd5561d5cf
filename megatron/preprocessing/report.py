"""Counts of a preparation."""

from __future__ import annotations

import dataclasses

from megatron.preprocessing.batch_encoder import MAX_LISTED, EncodedBatch


@dataclasses.dataclass
class Output:
    """Counts of what was written under one prefix."""

    prefix: str
    documents: int = 0
    sequences: int = 0
    tokens: int = 0


@dataclasses.dataclass
class Report:
    """Summary of `preprocess`.

    Attributes:
        documents: documents encoded; an output has fewer if some have no tokens.
        bad_lines: first of the `bad_count` skipped lines, as FILE:LINE: reason.
        read: bytes read from the inputs.
        records: records read from the inputs, also those of other shards.
    """

    outputs: list[Output]
    read: int = 0
    records: int = 0
    documents: int = 0
    text_bytes: int = 0
    seconds: float = 0.0
    bad_count: int = 0
    bad_lines: list[str] = dataclasses.field(default_factory=list)

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch."""
        for output, tokens in zip(self.outputs, batch.tokens, strict=True):
            output.documents += len(tokens.sequences_per_document)
            output.sequences += len(tokens.sequence_sizes)
            output.tokens += len(tokens.tokens)
        self.read = batch.read
        self.records = batch.records
        self.documents += batch.documents
        self.text_bytes += batch.text_bytes
        self.bad_count += batch.bad_count
        self.bad_lines += batch.bad[: MAX_LISTED - len(self.bad_lines)]
