"""Check that all processes of a run read the same data and tokenizer.

A stale copy of a file on one node would otherwise train on silently, with another loss.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator

import torch

from megatron.errors import InputError
from megatron.parallel.collectives import all_reduce_max
from megatron.parallel.mesh import Axis
from megatron.settings.data_tokenizer import DATA_FIELDS
from megatron.training.config import RunConfig
from megatron.variants.blend_flags import data_prefixes

# A larger file is read in blocks, evenly spaced: this many in all files together, but no fewer than MIN_BLOCKS each.
WHOLE_BYTES, BLOCK_BYTES, BLOCKS, MIN_BLOCKS = 1 << 22, 1 << 14, 2048, 16


def check_same_data(config: RunConfig, world: Axis) -> None:
    """Compare fingerprints of the files of data and tokenizer over all processes.

    A fingerprint is made of the size and of blocks of a file, so that it takes the same time for any size. It tells
    apart two corpora, and a file that was cut off or not copied completely, but not a change of a few bytes.

    Raises:
        InputError: names the files that differ.
    """
    files = list(_files(config))
    if world.size == 1 or not files:
        return
    blocks = max(MIN_BLOCKS, BLOCKS // len(files))
    keys = torch.tensor([fingerprint(file, blocks) for file in files])
    largest, smallest = all_reduce_max(torch.stack((keys, -keys)), world)
    differing = [file for file, same in zip(files, (largest == -smallest).tolist(), strict=True) if not same]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InputError(
            f"the processes do not read the same data: {', '.join(differing[:3])}{more} differ between machines; copy "
            "them again, or use a directory that all machines share"
        )


def _files(config: RunConfig) -> Iterator[str]:
    """The files that the flags name, whether they exist or not, so that all processes have the same list."""
    data, tokenizer = config.data, config.tokenizer
    for name in DATA_FIELDS:
        values = getattr(data, name)
        prefixes = data_prefixes(values, f"--{name.replace('_', '-')}") if values else []
        yield from (prefix + suffix for prefix, suffix in itertools.product(prefixes, (".bin", ".idx")))
    for path in (tokenizer.vocab_file, tokenizer.merge_file, tokenizer.tokenizer_model):
        if path is not None:
            yield os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path


def fingerprint(path: str, blocks: int) -> int:
    """63 bits that depend on the size of a file and on some of its content; 0 if it cannot be read."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            if size <= WHOLE_BYTES:
                digest.update(file.read(WHOLE_BYTES))
            else:
                for i in range(blocks):
                    file.seek((size - BLOCK_BYTES) * i // (blocks - 1))
                    digest.update(file.read(BLOCK_BYTES))
    except OSError:
        return 0
    return int.from_bytes(digest.digest(), "little") >> 1
