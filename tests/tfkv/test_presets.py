from __future__ import annotations

import pytest

from tfkv import presets
from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError
from tfkv.export import plan_memory
from tfkv.layers.cache_spec import CacheSpec

#: Of SmolLM2.
MODEL = DecoderConfig(49152, 30, 576, 9, 3, 64, 1536, context_length=8192)


def test_every_use_that_is_advised_has_a_preset():
    assert set(presets.PRESETS) == {
        *("chat", "summarise", "code"),
        *("long_document", "very_long", "throughput"),
    }
    most = {name: preset.capacity for name, preset in presets.PRESETS.items()}
    assert 1024 <= most["chat"] <= 2048
    assert 512 <= most["summarise"] <= 1024
    assert most["code"] <= 512


@pytest.mark.parametrize("preset", presets.PRESETS.values(), ids=presets.PRESETS)
def test_a_preset_holds_the_sessions_it_is_for(preset):
    """Of its own length, unless it forgets; and as many as its largest batch."""
    policy = CacheSpec.parse(preset.cache).policy
    assert policy.bounded or preset.capacity >= preset.length
    assert preset.slots >= preset.batch_sizes[-1]


@pytest.mark.parametrize(
    ("name", "saving"),
    [
        *(("chat", 0.734), ("summarise", 0.734), ("code", 0.734)),
        *(("long_document", 0.863), ("very_long", 0.99), ("throughput", 0.899)),
    ],
)
def test_bytes_of_a_session_against_float32(name, saving):
    """46,080 bytes a token of SmolLM2."""
    preset = presets.get(name)
    plan = plan_memory(MODEL, preset.engine(), preset.length, 1)
    share = (plan.session_bytes - plan.history_bytes) / (46_080 * preset.length)
    assert 1 - share == pytest.approx(saving, abs=0.001)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean 'very_long'\? Known presets: chat"):
        presets.get("verylong")
    with pytest.raises(ConfigError, match=r"no preset 'xyz'\. Known presets"):
        presets.get("xyz")
