"""Measurements: the figures each issue promises, and side-by-side runs against peers.

``python -m benchmarks.figures [ISSUE]`` measures the figures of `figures.tsv`;
``python -m benchmarks`` compares speeds with those of peers. Both run from the repository
root, and both keep what they export below ``artifacts/``.
"""
