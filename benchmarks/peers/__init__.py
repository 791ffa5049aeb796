"""Peers on the same weights, each in an environment of its own: ``python -m benchmarks.peers``
prepares them, ``python -m benchmarks`` runs them.

`table` lists environments and systems; a system is a module of this package that the Python of
its environment runs as a child process. It reads a `protocol.Job` and answers line by line, so
that it is timed alone and its memory is its own. Such a module imports the standard library,
NumPy, `protocol` and `child`, and what its environment has, but nothing of ours.
"""
