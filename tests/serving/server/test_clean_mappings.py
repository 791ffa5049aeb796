"""Only memory that can come back is given away."""

from tfkv.serving.server.memory import _clean_mappings

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
