"""Giving back the memory that only loading and compiling needed."""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Iterator

_MADV_DONTNEED = 4
_M_ARENA_MAX = -8
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)")


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
    """Returns free heap, and parts of libraries that are not in use, to the system.

    XLA's compiler leaves hundreds of megabytes of free heap behind, and starting TensorFlow
    touches most of its libraries once. What is a clean copy of a file need not stay: a page
    that is needed again comes back from the page cache. Does nothing where the system is not
    Linux with glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6", use_errno=True)
        maps = pathlib.Path("/proc/self/smaps").read_text(encoding="utf-8")
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        return
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _clean_mappings(maps):
        libc.madvise(start, end - start, _MADV_DONTNEED)


def _clean_mappings(maps: str) -> Iterator[tuple[int, int]]:
    """Address ranges that mirror a file, cannot be written, and hold no page of their own.

    The loader writes to some read-only mappings before it locks them; those do hold pages of
    their own, and dropping one would lose what was written.
    """
    span = None
    for line in maps.splitlines():
        header = _MAPPING.match(line)
        if header is not None:
            start, end, mode, inode = header.groups()
            clean = mode in ("r--p", "r-xp") and inode != "0"
            span = (int(start, 16), int(end, 16)) if clean else None
        elif span is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield span
