"""Whether XLA may compile in this process, as TensorFlow Serving's flag decides it."""

from __future__ import annotations

import ctypes
import pathlib

import tensorflow as tf


def set_xla_compilation(enabled: bool) -> None:
    """Allows or refuses XLA compilation, for the whole process.

    Stock TensorFlow Serving refuses unless it is started with
    ``--xla_cpu_compilation_enabled``: a model loads, and each call that must compile
    fails with INTERNAL ``XLA compilation disabled``. TensorFlow has no Python API for this
    switch, so the C++ function which that flag controls is called itself. What is
    compiled already stays usable.

    Args:
        enabled: Whether to compile.

    Raises:
        RuntimeError: This TensorFlow build does not export the switch.
    """
    symbol = "EnableXlaCompilation" if enabled else "DisableXlaCompilation"
    mangled = f"_ZN10tensorflow{len(symbol)}{symbol}Ev"
    library = pathlib.Path(tf.__file__).parent / "libtensorflow_cc.so.2"
    try:
        ctypes.CDLL(str(library))[mangled]()
    except (OSError, AttributeError) as error:
        if enabled:  # compilation is on unless somebody turned it off
            return
        raise RuntimeError(
            "This TensorFlow build cannot refuse XLA compilation: expected the symbol "
            f"{mangled} in {library}. Leave `xla_cpu_compilation_enabled` on."
        ) from error
