"""Compare the size of the run with that of its data and of the model, in the log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from megatron.data.bert_dataset import BertDataset
from megatron.data.dataset import Dataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed import chunks
from megatron.recipes.extension import JoinedDataset
from megatron.reports.flops import unused_parameters
from megatron.training.loop import Hook, Trainer
from megatron.training.start import run_length
from megatron.variants.blend import BlendedDataset
from megatron.variants.mock_data import MockBertDataset, MockGPTDataset

# Tokens per parameter of a dense causal model that reaches the lowest loss for its operations (arXiv 2203.15556).
COMPUTE_OPTIMAL = 20


class RunSize(Hook):
    """Logs the tokens of the run, the epochs that they are, and the tokens per parameter."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        if trainer.mesh.is_first and not trainer.config.training.skip_train:
            state = trainer.state
            # A resumed run may go on beyond `state.train_samples`, for which the order of its data was made.
            _, samples = run_length(
                trainer.config, trainer.batch_schedule, state.iteration, state.consumed_samples
            )
            unused = unused_parameters(trainer.config.model)
            for line in describe_size(
                trainer.datasets["train"],
                samples=samples,
                seq_length=trainer.config.data.seq_length,
                parameters=trainer.engine.buffer.num_elements - unused,
                causal=trainer.task.causal,
                is_mixture=unused > 0,
            ):
                trainer.log(line)
        return nullcontext()


def describe_size(
    dataset: Dataset,
    *,
    samples: int,
    seq_length: int,
    parameters: int,
    causal: bool,
    is_mixture: bool = False,
) -> list[str]:
    """Describe the run in a line, and each file of a blend in another one.

    Args:
        dataset: the training data. The description is empty unless it is GPT's or BERT's.
        samples: samples of the whole run.
        parameters: the active ones of a mixture of experts.
    """
    # An extended run has a dataset for each extension; only phases of the data give them other files.
    passes = dataset.datasets if isinstance(dataset, JoinedDataset) else [dataset]
    blends = [d.datasets if isinstance(d, BlendedDataset) else [d] for d in passes]
    kinds = GPTDataset | BertDataset | MockGPTDataset | MockBertDataset
    if not all(isinstance(d, kinds) for blend in blends for d in blend):
        return []
    tokens, left = samples * seq_length, samples
    parts = [f"tokens: {_short(tokens)} ({samples:,} samples x {seq_length:,})"]
    sizes: dict[str, int] = {}  # tokens of each file
    read: dict[str, int] = {}  # samples from each file
    for data, blend, is_last in zip(passes, blends, [*[False] * (len(passes) - 1), True], strict=True):
        count = left if is_last else min(left, len(data))
        left -= count
        shares = _samples_of_each(data, count) if isinstance(data, BlendedDataset) else [count]
        for file, share in zip(blend, shares, strict=True):
            if isinstance(file, GPTDataset | BertDataset):
                sizes[file.tokens.prefix] = num_tokens(file)
                read[file.tokens.prefix] = read.get(file.tokens.prefix, 0) + share
    if sizes:
        total = sum(sizes.values())
        parts.append(f"{_epochs(tokens, total)} of the {_short(total)} of the data")
    ratio = f"{tokens / parameters:.3g} per {'active ' if is_mixture else ''}parameter"
    known = causal and not is_mixture
    parts.append(ratio + (f" (compute-optimal: about {COMPUTE_OPTIMAL})" if known else ""))
    lines = [", ".join(parts)]
    if any(isinstance(d, BlendedDataset) for d in passes):
        for prefix, size in sizes.items():
            lines.append(f"  {_epochs(read[prefix] * seq_length, size)} of {prefix}, {_short(size)} tokens")
    return lines


def num_tokens(dataset: Dataset) -> int:
    """The tokens of the documents that the samples are made of, each counted once; 0 of synthetic data."""
    if isinstance(dataset, GPTDataset):
        # Every document of the range occurs in each epoch.
        documents, *_ = dataset.index
        first, last = int(documents.min()), int(documents.max())
    elif isinstance(dataset, BertDataset):
        (rows,) = dataset.index
        first, last = int(rows[:, 0].min()), int(rows[:, 1].max()) - 1
    else:
        return 0
    return int(dataset.tokens.sizes[first : last + 1].sum(dtype=np.int64))


def _samples_of_each(blend: BlendedDataset, samples: int) -> Sequence[int]:
    """Count the first samples of a blend that come from each of its datasets."""
    order, _ = blend.index
    counts = np.zeros(len(blend.datasets), dtype=np.int64)
    for part in chunks(min(samples, len(order))):
        counts += np.bincount(order[part], minlength=len(counts))
    return counts.tolist()


def _epochs(tokens: int, size: int) -> str:
    return f"{tokens / size:.3g} epochs"


def _short(count: int) -> str:
    """A number with a unit: 1,234,567 is 1.23M."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)
