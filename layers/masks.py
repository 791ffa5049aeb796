"""Attention masks, made from positions. No other module makes one."""

from __future__ import annotations

import tensorflow as tf


def exact(
    query_positions: tf.Tensor, key_positions: tf.Tensor, recent: int, sinks: int
) -> tf.Tensor:
    """Which keys each query reads exactly where a codec keeps some so, bool ``[..., T, S]``.

    Args:
        query_positions: int32 ``[..., T]``.
        key_positions: int32 ``[..., S]``.
        recent: Newest tokens, the query's own included.
        sinks: First tokens.
    """
    queries = query_positions[..., :, tf.newaxis]
    keys = key_positions[..., tf.newaxis, :]
    return (keys > queries - recent) | (keys < sinks)


def within(
    query_positions: tf.Tensor, key_positions: tf.Tensor, window: tf.Tensor | int
) -> tf.Tensor:
    """Which keys are among the newest `window`, the query's own token included, bool
    ``[..., T, S]``.

    Args:
        query_positions: int32 ``[..., T]``.
        key_positions: int32 ``[..., S]``.
        window: Tokens; a tensor must broadcast to the result.
    """
    return key_positions[..., tf.newaxis, :] > query_positions[..., :, tf.newaxis] - window


def visible(
    query_positions: tf.Tensor,
    key_positions: tf.Tensor,
    first_visible: tf.Tensor | None = None,
    sinks: int = 0,
) -> tf.Tensor:
    """Which keys each query may see.

    Args:
        query_positions: int32 ``[..., T]``, absolute; −1 marks padding, which sees nothing.
        key_positions: int32 ``[..., S]``, absolute; −1 marks an empty entry.
        first_visible: int32 ``[..., T]``, oldest position that each query sees apart from
            the sinks; 0 where left out.
        sinks: The first positions, seen by every query.

    Returns:
        bool ``[..., T, S]``: stored, not in the future, and recent enough or a sink.
    """
    queries = query_positions[..., :, tf.newaxis]
    keys = key_positions[..., tf.newaxis, :]
    seen = (keys >= 0) & (keys <= queries)
    if first_visible is None:
        return seen
    recent = keys >= first_visible[..., :, tf.newaxis]
    return seen & (recent | (keys < sinks)) if sinks else seen & recent


def stored(key_positions: tf.Tensor) -> tf.Tensor:
    """Which keys are there, whatever asks, bool ``[..., 1, S]``.

    Args:
        key_positions: int32 ``[..., S]``; −1 marks an empty entry.
    """
    return (key_positions >= 0)[..., tf.newaxis, :]
