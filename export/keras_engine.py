"""The stateful engine around a Keras model that is called as a whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfkv.cached_model import CachedModel
from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError
from tfkv.export.adapter_table import AdapterTable
from tfkv.export.engine import PREFILL_PIECE, Engine
from tfkv.export.history import History
from tfkv.export.session_slots import SessionSlots
from tfkv.export.session_table import SessionTable
from tfkv.export.slot_advance import SlotAdvance
from tfkv.export.slot_geometry import SlotGeometry
from tfkv.export.stats import Stats
from tfkv.export.transient import TransientVariable
from tfkv.layers import CachedCrossAttention
from tfkv.layers.keras_api import LEGACY


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """All that an engine asks of an architecture which it does not know."""

    vocabulary_size: int


class _NothingBeside:
    """Stands for what an engine of pages keeps of a session beside them."""

    def copy(self, source: tf.Tensor, target: tf.Tensor) -> None:
        """Nothing to copy."""

    def begin(self, slot: tf.Tensor, since: tf.Tensor) -> None:
        """Nothing to begin."""


class KerasEngine(Engine):
    """An `Engine` whose sessions are in one piece each: names, lifetimes, lock, history, sampling,
    roll-back, branches and counters are its own, and a slot holds the states of the model's
    layers. There are no pages, and so no shared prompts, no snapshots and no `attention`.

    Args:
        decoder: The model.
        engine: What to compile for; what it says of caches and pages is the layers' to say.
        positions: Most tokens of a session.
        fingerprint: Of weights and caches.

    Raises:
        ConfigError: A layer attends to an encoded sequence, or its cache cannot be served.
    """

    def __init__(
        self,
        decoder: CachedModel | CausalLM,
        engine: EngineConfig,
        positions: int,
        fingerprint: str,
    ) -> None:
        # Not that of Engine, which makes pools.
        tf.Module.__init__(self, name="tfkv")
        self.fingerprint = fingerprint
        self.engine = engine
        self.config: Any = _Vocabulary(decoder.vocabulary_size)
        self.groups: Any = SlotGeometry.of(_stores(decoder), positions)
        slots = SessionSlots(decoder, engine.slots, positions)
        self.pools: Any = slots
        self.tables: Any = slots
        self.kept: Any = _NothingBeside()
        self.tail: Any = self.kept
        self.adapters = AdapterTable({}, engine.slots)
        self.sessions = SessionTable(
            engine.slots, engine.ttl_ms, slots, engine.tenant_sessions, self.adapters
        )
        self.history = History(engine.slots, engine.history or positions)
        self.stats = Stats(self.sessions, self.history, slots, slots)
        self._advance = SlotAdvance(
            decoder, self.history, slots, self.groups, engine, PREFILL_PIECE
        )
        self._weights = variables_of(decoder)
        parts = [part for owner in (self.history, self.stats) for part in vars(owner).values()]
        self._resources = [part for part in parts if isinstance(part, TransientVariable)]
        self._resources += slots.variables
        self.compute = self._compile()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache a token of a full session takes, rounded up."""
        return -(-self.pools.page_bytes // self.groups.positions)


def variables_of(decoder: CachedModel | CausalLM) -> list[tf.Variable]:
    """Variables of a model, as TensorFlow has them."""
    model: Any = decoder.model if isinstance(decoder, CachedModel) else decoder
    variables = model.variables
    return list(variables) if LEGACY else [variable.value for variable in variables]


def _stores(decoder: CachedModel | CausalLM) -> list[Any]:
    """Stores of all layers.

    Raises:
        ConfigError: A layer attends to an encoded sequence.
    """
    if isinstance(decoder, CausalLM):
        return [block.attention.store for block in decoder.blocks]
    for layer in decoder.layers:
        if isinstance(layer, CachedCrossAttention):
            raise ConfigError(
                f"An artifact's calls have no place for what layer {layer.name!r} attends to, an "
                "encoded sequence. Export decoders; `CachedModel.generate` runs encoder-decoders."
            )
    return [layer.store for layer in decoder.layers]
