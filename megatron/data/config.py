"""Flags of the data path."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Which data, how it is split, and how a sample is cut from it."""

    data_path: tuple[str, ...] | None = flag(
        None,
        "prefix of the .idx and .bin files; or a blend, 'weight prefix weight prefix ...'",
        nargs="*",
        metavar="PREFIX",
    )
    split: str | None = flag(None, "shares of train, validation and test documents (default: 969, 30, 1)")
    train_data_path: tuple[str, ...] | None = flag(
        None,
        "prefix or blend for training alone, in place of --data-path and --split",
        nargs="*",
        metavar="PREFIX",
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "prefix or blend for validation alone", nargs="*", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "prefix or blend for testing alone", nargs="*", metavar="PREFIX"
    )
    mock_data: bool = flag(False, "train on synthetic tokens; no files are read")
    data_cache_path: str | None = flag(
        None, "directory for sample indices (default: 'index-cache' beside the data)", metavar="DIR"
    )
    seq_length: int | None = flag(
        None, "tokens in a training sample", low=1, aliases=("--encoder-seq-length",)
    )
    dataloader_type: str = flag(
        "single",
        "'single' reads the samples in order, once; 'cyclic' reshuffles every epoch",
        choices=("single", "cyclic"),
    )
    num_workers: int = flag(
        2, "processes that prepare batches; 0 prepares them in the training process", low=0
    )
    reset_position_ids: bool = flag(False, "count positions from 0 again after each end-of-document token")
    reset_attention_mask: bool = flag(False, "keep tokens from attending across an end-of-document token")
    eod_mask_loss: bool = flag(
        False, "leave out of the loss what follows directly on an end-of-document token"
    )
