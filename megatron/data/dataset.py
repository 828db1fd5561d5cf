"""Interface of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron.data.batch import Batch


class Dataset(Protocol):
    """Samples by index, and their collation. Datasets are pickled to reach worker processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Any:
        """Return sample `i`, in any form that `collate` takes."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Make a batch of samples, possibly of none. Runs in a worker process."""
