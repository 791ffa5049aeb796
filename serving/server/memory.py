"""The server's memory: what loading alone needed goes back, what is streamed gets large pages."""

from __future__ import annotations

import ctypes
import mmap
import pathlib
import re
from collections.abc import Iterator

import numpy as np

_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2**21
_LARGE = 2**25  # glibc gives larger blocks a mapping of their own, always
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)")


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


def use_huge_pages() -> None:
    """Puts weights and pool on pages of 2 MB.

    A decode step reads all weights and a long session's whole cache. On pages of 4 KB the
    processor spends a good part of that looking addresses up: a step at 4000 tokens took
    27 ms instead of 33 (docs/decisions). Call it once a version is loaded. Does nothing where
    the kernel doesn't offer it (Linux 6.1 or newer does).
    """
    try:
        libc = ctypes.CDLL("libc.so.6", use_errno=True)
        maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
    except (OSError, AttributeError):
        return
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    for start, end in _large_mappings(maps):
        start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        present = np.zeros((end - start) // mmap.PAGESIZE, np.uint8)
        if libc.mincore(start, end - start, present.ctypes.data):
            continue
        for first, last in _full_runs(present.reshape(-1, _HUGE_PAGE // mmap.PAGESIZE) & 1):
            address, size = start + first * _HUGE_PAGE, (last - first) * _HUGE_PAGE
            libc.madvise(address, size, _MADV_HUGEPAGE)
            libc.madvise(address, size, _MADV_COLLAPSE)


def _large_mappings(maps: str) -> Iterator[tuple[int, int]]:
    """Address ranges that hold tensors too large for the heap; neighbours share one."""
    for line in maps.splitlines():
        header = _MAPPING.match(line)
        if header is not None:
            start, end, mode, inode = header.groups()
            if mode == "rw-p" and inode == "0" and not line.endswith("]"):
                span = int(start, 16), int(end, 16)
                if span[1] - span[0] >= _LARGE:
                    yield span


def _full_runs(present: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of rows of ``present [large pages, small pages]`` that are all in use.

    Where some are not, a large page would take memory for nothing.
    """
    full = np.concatenate([[False], present.all(axis=1), [False]])
    edges = np.flatnonzero(full[1:] != full[:-1])
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


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
