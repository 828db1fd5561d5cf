"""Make a corpus from the text in every Python installation: one JSON object per line.

The text is the language reference (`pydoc_data.topics`), the docstrings of the modules built into the interpreter, and
the sources of the standard library: 10 to 12 MB, the same for the same Python version.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag

# Tests are left out because slim installations do not carry them, encodings because they are tables.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}
TABLES = {"html/entities.py", "locale.py", "re/_casefix.py", "stringprep.py"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig(Config):
    """Output file and size of the corpus."""

    output: str = flag(
        None, "file to write, one {'text', 'source'} object per line", metavar="FILE", required=True
    )
    megabytes: float | None = flag(
        None, "stop once the documents hold this many megabytes (default: use all)", above=0
    )


def language_reference() -> Iterator[tuple[str, str]]:
    """Yield (source, text) for each topic of `help()`."""
    for name in sorted(topics):
        yield f"pydoc_data.topics/{name}", topics[name].strip() + "\n"


def builtin_docstrings() -> Iterator[tuple[str, str]]:
    """Yield (source, text) for each module and class written in C and built into the interpreter.

    No source file of the standard library has their documentation.
    """
    for name in sorted(sys.builtin_module_names):
        module = importlib.import_module(name)
        owners: dict[str, object] = {name: module}
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == name:
                owners[f"{name}.{value.__name__}"] = value
        for title, owner in sorted(owners.items()):
            parts = [documented(title, owner)]
            parts += [
                documented(f"{title}.{member}", value)
                for member, value in sorted(vars(owner).items())
                if callable(value) and not isinstance(value, type)
            ]
            yield title, "\n".join(filter(None, parts))


def documented(name: str, value: object) -> str:
    """The name and docstring of `value`; empty if it has none."""
    doc = getattr(value, "__doc__", None)
    return f"{name}\n\n{doc.strip()}\n" if isinstance(doc, str) else ""


def library_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, text) for each module of the standard library below `root`, in sorted order."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name)
            source = path.relative_to(root).as_posix()
            # Skip files with paths of the machine that built this Python, and the source of the topics.
            generated = name.startswith("_sysconfigdata") or source.startswith(("config-", "pydoc_data/"))
            if path.suffix != ".py" or generated or source in TABLES:
                continue
            try:
                yield source, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # one of the few modules in another encoding


def corpus() -> list[tuple[str, str]]:
    """All documents as (source, text), shuffled deterministically.

    They are shuffled because training, validation and test documents are consecutive parts of a file.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = [*language_reference(), *builtin_docstrings(), *library_sources(root)]
    documents = [(source, text) for source, text in documents if text.strip()]
    random.Random(1234).shuffle(documents)
    return documents


def first_megabytes(documents: list[tuple[str, str]], megabytes: float) -> list[tuple[str, str]]:
    """The first documents that together hold `megabytes` of text.

    Raises:
        InputError: this Python installation has less text.
    """
    size = 0
    for count, (_, text) in enumerate(documents, start=1):
        size += len(text.encode())
        if size >= megabytes * 1e6:
            return documents[:count]
    raise InputError(f"--megabytes: {megabytes:g} is too much; this Python installation has {size / 1e6:.1f}")


def main() -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, CorpusConfig, "corpus")
    config = make_config(CorpusConfig, vars(parser.parse_args()))
    output = Path(config.output)
    if output.is_dir():
        raise InputError(f"--output: {output} cannot be written: it is a directory")
    documents = corpus()
    if config.megabytes is not None:
        documents = first_megabytes(documents, config.megabytes)

    partial = output.with_name(f"{output.name}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": t, "source": s}) + "\n" for s, t in documents)
        os.replace(partial, output)
    except OSError as error:
        raise InputError(f"--output: {output} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    size = sum(len(text.encode()) for _, text in documents)
    print(f"{output}: {len(documents):,} documents, {size / 1e6:.1f} MB of text")


if __name__ == "__main__":
    run_command(main)
