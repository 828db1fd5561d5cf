"""Read Hugging Face datasets, from a folder or by their names, as streams of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.preprocessing.inputs import DATASET, reason


def read_rows(address: str, keys: Sequence[str], rows: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a dataset in order, at most `rows` at once, with the columns `keys`.

    Args:
        address: hf:NAME, hf:NAME:SPLIT, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT. NAME is a folder or a name on the hub.

    Raises:
        InputError: the library is missing, or the dataset cannot be read or lacks a column.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{address}: reading Hugging Face datasets needs a library: pip install datasets"
        ) from None
    if int(datasets.__version__.split(".")[0]) < 4:
        raise InputError(
            f"{address}: datasets {datasets.__version__} may run code of a dataset; pip install 'datasets>=4'"
        )
    try:
        dataset = _load(datasets, address)
        names = dataset.column_names  # None if only the first row will tell
        missing = [key for key in keys if names is not None and key not in names]
        if missing:
            raise InputError(
                f"{address}: has no column {missing[0]!r}; its columns: {', '.join(names)} (--json-keys)"
            )
        if names is not None:
            dataset = dataset.select_columns(list(keys))
        for part in dataset.iter(batch_size=rows):
            columns = [part.get(key) for key in keys]
            if None in columns:
                raise InputError(
                    f"{address}: has no column {keys[columns.index(None)]!r}; its columns: {', '.join(part)} "
                    "(--json-keys)"
                )
            yield [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]
    except (InputError, GeneratorExit):
        raise
    except Exception as error:  # the library passes on those of a dozen others
        raise InputError(f"{address}: cannot be read: {reason(error)}") from None


def _load(datasets: Any, address: str) -> Any:
    """Load one split: from memory-mapped files if `save_to_disk` wrote them, otherwise as a stream."""
    name, *words = address.removeprefix(DATASET).split(":")
    if not name or len(words) > 2 or "" in words:
        raise InputError(f"--input: {address}: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    if _is_saved(Path(name)):
        return _saved(datasets.load_from_disk(name), address, words)
    if os.sep in name and name.startswith((".", os.sep)) and not os.path.exists(name):
        raise InputError(f"--input: {address}: there is no folder {name}")
    if len(words) == 1:
        configs = datasets.get_dataset_config_names(name)
        config, split = (words[0], "train") if words[0] in configs else (None, words[0])
    else:
        config, split = words or (None, "train")
    splits = datasets.get_dataset_split_names(name, config)
    if split not in splits:
        raise InputError(f"--input: {address}: has no split {split}; its splits: {', '.join(splits)}")
    return datasets.load_dataset(name, config, split=split, streaming=True)


def _is_saved(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _saved(loaded: Any, address: str, words: Sequence[str]) -> Any:
    if len(words) > 1:
        raise InputError(
            f"--input: {address}: a saved dataset has no configs; write hf:FOLDER or hf:FOLDER:SPLIT"
        )
    if not isinstance(loaded, dict):
        if words:
            raise InputError(f"--input: {address}: this folder holds a single split; write hf:FOLDER")
        return loaded
    split = words[0] if words else "train"
    if split not in loaded:
        raise InputError(f"--input: {address}: has no split {split}; its splits: {', '.join(loaded)}")
    return loaded[split]
