from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from tfkv.layers import CachedMultiHeadAttention
from tfkv.layers.keras_api import LEGACY, keras
print(keras.__name__, LEGACY, issubclass(CachedMultiHeadAttention, keras.layers.Layer))
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("name", "legacy"), [("keras", False), ("tf_keras", True)])
def test_one_variable_chooses_for_the_process(name: str, legacy: bool):
    words = run(TFKV_KERAS=name).stdout.split()
    assert words[0].startswith(name)
    assert words[1:] == [str(legacy), "True"]


def test_another_name_is_refused():
    assert "must be 'keras' or 'tf_keras'" in run(TFKV_KERAS="keras2").stderr
