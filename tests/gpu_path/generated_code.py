"""Triton kernels in the code that torch.compile generates, and what they compile to."""

from __future__ import annotations

import ast
import dataclasses
import math
import re

# Below it a kernel may have blocks larger than its work, and then needs masks.
LARGE = 2**16
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Triton kernel: its name, and the text of its module."""

    name: str
    text: str

    @property
    def source(self) -> str:
        return self.text[self.text.index("@triton.jit") :]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of its dimensions, such as "xnumel"; those of a reduction include "r0_numel"."""
        return {
            name: int(size) for name, size in re.findall(r"^    (\w+numel) = (\d+)$", self.text, re.MULTILINE)
        }

    @property
    def work(self) -> int:
        """Elements that it computes with."""
        return math.prod(self.sizes.values())

    @property
    def signature(self) -> dict[str, str]:
        """Types of its parameters besides those of blocks."""
        found = re.search(r"'signature': (\{.*?\})", self.text)
        assert found is not None
        types = ast.literal_eval(found[1])
        return {name: kind for name, kind in types.items() if kind != "constexpr"}

    @property
    def divisible(self) -> int:
        """Number of parameters that are divisible by 16."""
        found = re.search(r"divisible_by_16=\(([\d, ]*)\)", self.text)
        assert found is not None
        return len(re.findall(r"\d+", found[1]))


def kernels(code: str) -> list[Kernel]:
    return [Kernel(name, text) for name, text in KERNEL.findall(code)]


def masked(kernel: Kernel) -> bool:
    """True if the kernel compares indices of its outputs with their number."""
    return "xindex < xnumel" in kernel.source


def narrow_numbers(kernel: Kernel) -> list[str]:
    """Lines with a number of 32 bits or more that is not a number of 64 bits, so that a product or sum overflows."""
    return [
        line.strip()
        for line in kernel.source.splitlines()
        for number in re.findall(
            r"(?<![\w.])\d+(?![\w.])", re.sub(r"tl\.full\(\[.*?\], -?\d+, tl\.u?int64\)", "", line)
        )
        if int(number) >= 2**31 and "numel = " not in line
    ]


def narrow_index(kernel: Kernel) -> bool:
    """True if indices of 32 bits count more elements than these have."""
    return kernel.work >= 2**31 and "tl.program_id(0).to(tl.int64)" not in kernel.source
