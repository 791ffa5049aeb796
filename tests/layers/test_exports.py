from __future__ import annotations

import subprocess
import sys

import pytest

import tfkv.layers


def test_every_name_is_there():
    for name in tfkv.layers.__all__:
        assert getattr(tfkv.layers, name).__name__ == name
    assert set(tfkv.layers.__all__) <= set(dir(tfkv.layers))
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchLayer'"):
        _ = tfkv.layers.NoSuchLayer


def test_importing_the_package_loads_nothing():
    code = "import sys, tfkv.layers; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
