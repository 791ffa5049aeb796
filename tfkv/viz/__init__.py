"""Pictures of attention, caches and sessions: arrays in, matplotlib figures or HTML out.

It needs ``pip install 'tfkv[viz]'``. Colours can be told apart by everyone and in grey; no
function draws on a screen or keeps a figure.
"""

from tfkv.viz.attention import (
    attention_entropy,
    attention_grid,
    attention_map,
    entropy_by_layer,
    sink_share,
    sinks_by_layer,
)
from tfkv.viz.calls import CallTokens, Span, Timeline, session_timeline, tokens_by_call
from tfkv.viz.curves import QualityPoint, learning_curve, memory_curve, quality_curve
from tfkv.viz.html import Html
from tfkv.viz.page import attention_page
from tfkv.viz.retention import coloured_text, coloured_text_figure, kept_tokens, retention_map

__all__ = [
    "CallTokens",
    "Html",
    "QualityPoint",
    "Span",
    "Timeline",
    "attention_entropy",
    "attention_grid",
    "attention_map",
    "attention_page",
    "coloured_text",
    "coloured_text_figure",
    "entropy_by_layer",
    "learning_curve",
    "memory_curve",
    "quality_curve",
    "kept_tokens",
    "retention_map",
    "session_timeline",
    "sink_share",
    "sinks_by_layer",
    "tokens_by_call",
]
