"""A data set of your own: train on the bytes of a file, without a tokenizer or a conversion.

python -m examples.own_data --data-path README.md [flags of pretrain_gpt.py]
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from megatron.api import GPT, Dataset, GPTSamples, InputError, RunConfig, Tokenizer, main


@dataclasses.dataclass(kw_only=True)
class Pieces(GPTSamples):
    """Random pieces of a text. A piece depends on its index alone, so that a resumed run sees the same ones."""

    text: np.ndarray
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return seq_length + 1 tokens. `GPTSamples.collate` makes a batch of them."""
        length = self.config.seq_length + 1
        start = np.random.default_rng(i).integers(len(self.text) - length + 1)
        return {"text": self.text[start : start + length]}


def build_datasets(config: RunConfig, tokenizer: Tokenizer, samples: tuple[int, ...]) -> dict[str, Dataset]:
    """Train on the first nine tenths of the file and evaluate on the rest, with as many samples as the run wants."""
    data = config.data
    paths = data.require("data_path")[0]
    if len(paths) != 1 or not Path(paths[0]).is_file():
        raise InputError(f"--data-path: {' '.join(paths)} is not one file; name the file to train on")
    text = np.frombuffer(Path(paths[0]).read_bytes(), dtype=np.uint8).astype(np.int64)
    cut = len(text) * 9 // 10
    if len(text) - cut <= data.seq_length:
        raise InputError(f"--data-path: {paths[0]} is shorter than 10 x --seq-length {data.seq_length}")
    common = {"config": data, "vocab_size": tokenizer.vocab_size}
    train = Pieces(text=text[:cut], samples=samples[0], **common)
    return {"train": train, "validation": Pieces(text=text[cut:], samples=samples[1], **common)}


TASK = dataclasses.replace(GPT, build_datasets=build_datasets)
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
DATA = {"tokenizer_type": "NullTokenizer", "vocab_size": 256, "micro_batch_size": 8}

if __name__ == "__main__":
    main(TASK, description=__doc__, defaults=MODEL | DATA | {"lr": 3e-3, "train_iters": 100})
