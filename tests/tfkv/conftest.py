"""Lets these tests import the helpers beside them."""

from __future__ import annotations

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent))
