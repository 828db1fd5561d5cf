"""Memory that malloc keeps, measured on a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes
from megatron.ops.cpu.malloc import keep_freed_memory, return_freed_memory

libc, size = ctypes.CDLL(None), 64 << 20
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def kept():
    before, block = resident(), libc.malloc(size)
    ctypes.memset(block, 1, size)
    assert resident() - before > 0.9 * size
    libc.free(block)
    return (resident() - before) / size > 0.9

print(kept())
keep_freed_memory()
print(kept())
return_freed_memory()
print(kept(), resident() < size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept_and_returned() -> None:
    """glibc maps a large block on its own, and so returns it when it is freed, unless it may not map."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\nTrue\nFalse True\n", "")
