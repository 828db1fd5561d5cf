"""Ways to damage a file."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

NUMBERS = (b"0", b"-1", b"1000000000000000", b"9" * 5000, b"1e999", b"-0.5", b"nan", b'"1"', b"null")
INTEGERS = (0, 1, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)


def flip(path: Path, rng: random.Random) -> None:
    """Flip a bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((0, rng.randrange(path.stat().st_size))))


def zero(path: Path, rng: random.Random) -> None:
    """Zero a page, or a quarter of a small file."""
    content = bytearray(path.read_bytes())
    length = min(4096, -(-len(content) // 4))
    begin = rng.randrange(len(content)) // length * length
    content[begin : begin + length] = bytes(len(content[begin : begin + length]))
    path.write_bytes(content)


def integer(path: Path, rng: random.Random) -> None:
    """Write a hostile integer of 8 bytes into the first kilobyte, where the sizes are, or anywhere."""
    content = bytearray(path.read_bytes())
    begin = rng.randrange(min(len(content), rng.choice((1024, len(content)))))
    content[begin : begin + 8] = rng.choice(INTEGERS).to_bytes(8, rng.choice(("little", "big")))
    path.write_bytes(content)


def number(path: Path, rng: random.Random) -> None:
    """Replace a number in the text."""
    content = path.read_bytes()
    found = list(re.finditer(rb"\d+", content))
    if not found:
        return flip(path, rng)
    place = rng.choice(found)
    path.write_bytes(content[: place.start()] + rng.choice(NUMBERS) + content[place.end() :])


def nest(path: Path, rng: random.Random) -> None:
    """Insert thousands of brackets."""
    content = path.read_bytes()
    begin = rng.randrange(len(content))
    path.write_bytes(content[:begin] + rng.choice((b"[", b'{"a":', b"(", b"- ")) * 100_000 + content[begin:])


def repeat(path: Path, rng: random.Random) -> None:
    """Repeat a part of the content, so that rows or keys are there twice."""
    content = path.read_bytes()
    begin, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    path.write_bytes(content[:end] + content[begin:])


def enlarge(path: Path, rng: random.Random) -> None:
    """Append a hole of up to 4 TB."""
    os.truncate(path, rng.choice((1 << 33, 1 << 42)))


def endless(path: Path, rng: random.Random) -> None:
    """Replace the file by a device without an end."""
    path.unlink()
    path.symlink_to("/dev/zero")


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()
    if rng.random() < 0.3:
        path.mkdir()


def swap(path: Path, rng: random.Random) -> None:
    """Replace the content by that of another file of the same suffix, or of any, in the nearest folder with one."""
    for folder in path.parents:
        others = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size and p != path]
        if others:
            break
    alike = [p for p in others if p.suffix == path.suffix]
    shutil.copyfile(rng.choice(alike if alike and rng.random() < 0.7 else others), path)


DAMAGES: Sequence[Callable[[Path, random.Random], None]] = (
    flip,
    truncate,
    zero,
    integer,
    number,
    nest,
    repeat,
    enlarge,
    endless,
    remove,
    swap,
)
