"""Flags of the data path."""

from __future__ import annotations

import dataclasses

from megatron.data.split import parse_split
from megatron.flags import Config, InputError, flag, flag_name

BERT_FIELDS = ("mask_prob", "short_seq_prob", "bert_binary_head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Which data, how it is split, and how a sample is cut from it."""

    data_path: tuple[str, ...] | None = flag(
        None,
        "path of the .bin and .idx files, without these endings; or a blend: WEIGHT PREFIX WEIGHT PREFIX ...",
        nargs="+",
        metavar="PREFIX",
    )
    split: str | None = flag(
        None,
        "shares of the documents of --data-path, in any unit (default: 969,30,1)",
        metavar="TRAIN,VALID,TEST",
    )
    train_data_path: tuple[str, ...] | None = flag(
        None,
        "prefix or blend for training alone, in place of --data-path and --split",
        nargs="+",
        metavar="PREFIX",
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "prefix or blend for validation alone", nargs="+", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "prefix or blend for testing alone", nargs="+", metavar="PREFIX"
    )
    data_order: str = flag(
        "v2.5",
        "GPT: whose order of samples: Megatron-LM v2.5's or its HEAD's, which differ in how a split and the shares of "
        "a blend are rounded",
        choices=("v2.5", "head"),
    )
    mock_data: bool = flag(False, "train on synthetic tokens; no files are read")
    data_cache_path: str | None = flag(
        None, "directory for sample indices (default: 'index-cache' beside the data)", metavar="DIR"
    )
    seq_length: int | None = flag(
        None,
        "tokens in a training sample (a run needs it)",
        low=1,
        high=2**26,
        aliases=("--encoder-seq-length",),
    )
    dataloader_type: str = flag(
        "single",
        "'single' reads the samples in order, once; 'cyclic' reshuffles every epoch",
        choices=("single", "cyclic"),
    )
    num_workers: int = flag(
        2, "processes that prepare batches; 0 prepares them in the training process", low=0, high=256
    )
    reset_position_ids: bool = flag(False, "count positions from 0 again after each end-of-document token")
    reset_attention_mask: bool = flag(False, "keep tokens from attending across an end-of-document token")
    eod_mask_loss: bool = flag(
        False, "leave out of the loss what follows directly on an end-of-document token"
    )
    mask_prob: float = flag(0.15, "BERT: share of the tokens that are masked, to be guessed", above=0, high=1)
    short_seq_prob: float = flag(
        0.1, "BERT: chance that a sample is a short one; taken as one in a whole number, or 0", low=0, high=1
    )
    bert_binary_head: bool = flag(
        True,
        "BERT: no prediction of the order of sentences; samples are of one segment, and the model has no head for it",
        name="--bert-no-binary-head",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = [
            f"--{part}-data-path"
            for part in ("train", "valid", "test")
            if getattr(self, f"{part}_data_path") is not None
        ]
        if own and self.data_path is not None:
            raise InputError(
                f"{own[0]} and --data-path exclude each other; --data-path is divided by --split"
            )
        if own and self.split is not None:
            raise InputError(f"{own[0]} and --split exclude each other; --split divides --data-path")
        if self.mock_data and (own or self.data_path is not None):
            raise InputError(f"{(own or ['--data-path'])[0]} and --mock-data exclude each other")
        if self.split is not None:
            parse_split(self.split)

    @property
    def needs_eod(self) -> bool:
        """Whether a flag asks for what only an end-of-document token can tell."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    @property
    def given_of_bert(self) -> list[str]:
        """The flags about BERT's samples that do not have their default values."""
        fields = [field for field in dataclasses.fields(self) if field.name in BERT_FIELDS]
        return [flag_name(field) for field in fields if getattr(self, field.name) != field.default]
