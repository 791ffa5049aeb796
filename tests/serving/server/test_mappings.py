"""Only memory that can come back is given away; only memory in use gets large pages."""

import numpy as np

from tfkv.serving.server.memory import _clean_mappings, _full_runs, _large_mappings

_MAPS = """\
1000-2000 r-xp 00000000 08:01 7 /lib/code.so
Rss: 4 kB
Anonymous:             0 kB
2000-3000 r--p 00001000 08:01 7 /lib/code.so
Anonymous:             4 kB
3000-4000 rw-p 00002000 08:01 7 /lib/code.so
Anonymous:             0 kB
4000-5000 r--p 00000000 00:00 0
Anonymous:             0 kB
5000-6000 r--p 00003000 08:01 7 /lib/code.so
Anonymous:             0 kB
"""


def test_written_writable_and_anonymous_memory_is_kept():
    assert list(_clean_mappings(_MAPS)) == [(0x1000, 0x2000), (0x5000, 0x6000)]


def test_only_anonymous_writable_memory_of_32_mb_or_more_is_large():
    maps = """\
10000000-12000000 rw-p 00000000 00:00 0
20000000-21fff000 rw-p 00000000 00:00 0
30000000-32000000 rw-p 00000000 00:00 0                          [heap]
40000000-42000000 rw-p 00000000 08:01 7 /lib/code.so
50000000-52000000 r--p 00000000 00:00 0
"""
    assert list(_large_mappings(maps)) == [(0x10000000, 0x12000000)]


def test_only_large_pages_that_are_in_use_whole_are_taken():
    present = np.ones([6, 4], np.uint8)
    present[2, 1] = present[3] = 0
    assert list(_full_runs(present)) == [(0, 2), (4, 6)]
    assert list(_full_runs(present * 0)) == []
