"""Memory that only loading needed goes back to the system, and everything still runs."""

import subprocess
import sys

_SCRIPT = """
import ctypes
import tensorflow as tf
from tfkv.serving.server.memory import share_heap, trim_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

share_heap()
before = resident()
trim_memory()
after = resident()
assert tf.reduce_sum(tf.ones([3])).numpy() == 3.0
print(before, after)
"""


def test_trimming_gives_code_pages_back_and_tensorflow_still_runs():
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after < before
