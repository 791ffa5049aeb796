"""Giving back the memory that only loading and compiling needed."""

from __future__ import annotations

import ctypes
import pathlib
import re

_MADV_DONTNEED = 4
_M_ARENA_MAX = -8
_CODE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ [1-9]\d* +/")


def share_heap() -> None:
    """Lets all threads share one heap, for the rest of the process.

    XLA's compiler runs on many threads; a heap for each keeps what was free in it. Call it
    before loading. Does nothing where the system is not Linux with glibc.
    """
    try:
        ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, 1)
    except (OSError, AttributeError):
        return


def trim_memory() -> None:
    """Returns free heap, and program code that is not in use, to the system.

    XLA's compiler leaves hundreds of megabytes of free heap behind, and starting TensorFlow
    touches most of its code once. Code pages are clean copies of files: one that is needed
    again comes back from the page cache. Does nothing where the system is not Linux with
    glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6", use_errno=True)
        maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        return
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in maps.splitlines():
        match = _CODE.match(line)
        if match is not None:
            start, end = (int(address, 16) for address in match.groups())
            libc.madvise(start, end - start, _MADV_DONTNEED)
