"""Stateful LLM decoding inside stock TensorFlow Serving.

Importing this package stays cheap: it runs before every ``tfkv.*`` import,
and the client must start without the TensorFlow runtime.
"""

from tfkv._version import __version__

__all__ = ["__version__"]
