"""Flags of the data pipeline."""

from __future__ import annotations

import dataclasses

from megatron.data.samplers import SAMPLE_ORDERS
from megatron.data.split import DATA_ORDERS, parse_split
from megatron.errors import InputError
from megatron.flags import Config, flag, flag_name

BERT_FIELDS = ("mask_prob", "short_seq_prob", "bert_binary_head", "padding_free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Data files, their split, and how samples are made from them."""

    data_path: tuple[str, ...] | None = flag(
        None,
        "prefix of a .bin and .idx file (their path without extension), or a blend: WEIGHT PREFIX WEIGHT PREFIX ...; "
        "from=SAMPLES begins another blend after so many training samples",
        nargs="+",
        metavar="PREFIX",
    )
    split: str | None = flag(
        None,
        "proportions of train, validation and test documents in --data-path (default: 969,30,1)",
        metavar="TRAIN,VALID,TEST",
    )
    train_data_path: tuple[str, ...] | None = flag(
        None,
        "prefix or blend for training, instead of --data-path and --split",
        nargs="+",
        metavar="PREFIX",
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "prefix or blend for validation", nargs="+", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "prefix or blend for testing", nargs="+", metavar="PREFIX"
    )
    data_order: str = flag(
        "v2.5",
        "GPT: sample order of Megatron-LM v2.5 or of its main branch (head); they round splits and blend weights "
        "differently",
        choices=DATA_ORDERS.keys(),  # plug-ins add to them
    )
    mock_data: bool = flag(False, "train on synthetic tokens instead of files")
    data_cache_path: str | None = flag(
        None, "folder for sample indices (default: 'index-cache' next to the data)", metavar="DIR"
    )
    # Required by a run (`require`); None only for tools that build no samples.
    seq_length: int = flag(
        None,
        "tokens per sample (required for a run)",
        low=1,
        high=2**26,
        aliases=("--encoder-seq-length",),
    )
    dataloader_type: str = flag(
        "single",
        "'single' reads the samples once, in order; 'cyclic' reshuffles them every epoch",
        choices=SAMPLE_ORDERS.keys(),  # plug-ins add to them
    )
    num_workers: int = flag(
        2, "worker processes that prepare batches; 0: prepare them in the training process", low=0, high=256
    )
    packing: str = flag(
        "concatenated",
        "GPT samples: 'concatenated' documents, cut where a sample ends, or 'best-fit': whole documents, and padding",
        choices=("concatenated", "best-fit"),
    )
    reset_position_ids: bool = flag(False, "restart position ids at 0 after each end-of-document token")
    reset_attention_mask: bool = flag(False, "prevent attention across end-of-document tokens")
    eod_mask_loss: bool = flag(False, "exclude predictions at end-of-document tokens from the loss")
    mask_prob: float = flag(0.15, "BERT: fraction of tokens to predict", above=0, high=1)
    short_seq_prob: float = flag(
        0.1, "BERT: probability of a sample shorter than --seq-length; rounded to 1/n, or to 0", low=0, high=1
    )
    bert_binary_head: bool = flag(
        True,
        "BERT: no sentence-order prediction: one segment per sample, and a model without that head",
        name="--bert-no-binary-head",
    )
    padding_free: bool = flag(
        False,
        "BERT: lay the samples of a microbatch end to end in one sequence, without padding between them",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = [
            f"--{split}-data-path"
            for split in ("train", "valid", "test")
            if getattr(self, f"{split}_data_path") is not None
        ]
        if own and self.data_path is not None:
            raise InputError(f"{own[0]} and --data-path exclude each other; --split divides --data-path")
        if own and self.split is not None:
            raise InputError(f"{own[0]} and --split exclude each other; --split divides --data-path")
        if self.mock_data and (own or self.data_path is not None):
            raise InputError(f"{(own or ['--data-path'])[0]} and --mock-data exclude each other")
        if self.mock_data and self.packing != "concatenated":
            raise InputError(
                f"--packing {self.packing} and --mock-data exclude each other: synthetic samples are not packed"
            )
        if self.split is not None:
            parse_split(self.split)

    @property
    def needs_eod(self) -> bool:
        """True if a flag depends on the end-of-document token."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    @property
    def bert_flags_given(self) -> list[str]:
        """Names of the BERT flags with non-default values."""
        fields = [field for field in dataclasses.fields(self) if field.name in BERT_FIELDS]
        return [flag_name(field) for field in fields if getattr(self, field.name) != field.default]
