"""Memory that only loading needed goes back to the system, and what stays keeps its values."""

import subprocess
import sys

_SCRIPT = """
import ctypes
import tensorflow as tf
from tfkv.serving.server.memory import trim_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

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


_HUGE = """
import numpy as np
from tfkv.serving.server.memory import use_huge_pages

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

data, room = np.arange(2**24), np.empty(2**24)
before = resident()
use_huge_pages()
assert (data == np.arange(2**24)).all()
print(resident() - before)
"""


def test_large_pages_keep_what_is_stored_and_touch_nothing_else():
    """An array that was never written stays without memory."""
    done = subprocess.run(
        [sys.executable, "-c", _HUGE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**24, "an eighth of either array"
