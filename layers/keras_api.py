"""The Keras that layers and models are built on: Keras 3, or Keras 2 as `tf_keras` keeps it.

One choice for a process, made when this module is imported: the environment variable
``TFKV_KERAS`` is ``keras`` (the default) or ``tf_keras``. keras-nlp's own models are Keras 3 only;
our layers, the models built of them, training and export run on both.

Attributes:
    keras: The module.
    LEGACY: Whether it is Keras 2.
    KEEPS_DTYPE: Arguments of `add_weight` for a weight that mixed precision shall not cast.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from tfkv.errors import ConfigError

__all__ = ["KEEPS_DTYPE", "LEGACY", "SWITCH", "keras", "serialize_policy"]

SWITCH = "TFKV_KERAS"

_chosen = os.environ.get(SWITCH, "keras")
if _chosen not in ("keras", "tf_keras"):
    raise ConfigError(f"`{SWITCH}` must be 'keras' or 'tf_keras'. Received: {SWITCH}={_chosen!r}.")

keras: Any = importlib.import_module(_chosen)
LEGACY = _chosen == "tf_keras"
KEEPS_DTYPE = {"experimental_autocast" if LEGACY else "autocast": False}


def serialize_policy(policy: Any) -> Any:
    """A layer's dtype policy, for its configuration."""
    if LEGACY:
        return policy.name
    return keras.dtype_policies.serialize(policy)
