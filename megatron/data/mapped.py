"""Read-only memory maps of files, which hold no file descriptor.

np.memmap keeps a descriptor for each map (so does mmap.mmap before Python 3.13), and a blend of many files has several
maps for each of them: more than a process may open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_file(path: str) -> np.ndarray:
    """Map a file, uint8 [bytes]. Its memory is released with the last array that views it.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return np.empty(0, dtype=np.uint8)  # an empty file cannot be mapped
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    values = np.frombuffer(memoryview(memory), dtype=np.uint8)
    values.flags.writeable = False
    return values
