"""The embedded server behind ``tfkv serve``: TensorFlow Serving's API without Docker."""

from tfkv.serving.server.batching_parameters import BatchingParameters
from tfkv.serving.server.server import Progress, Server, run
from tfkv.serving.server.session_options import SessionOptions

__all__ = ["BatchingParameters", "Progress", "Server", "SessionOptions", "run"]
