"""Real text that every Python has, so that measurements need no download."""

from __future__ import annotations


def language_reference() -> str:
    """Python's language reference, from the standard library: English prose with some code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
