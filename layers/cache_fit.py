"""Which caches fit which kind of positions."""

from __future__ import annotations

from tfkv.errors import ConfigError
from tfkv.layers.cache_spec import CacheSpec


def check_fit(cache: CacheSpec, positions: str) -> None:
    """Refuses a cache whose policy relies on rotary positions where there are none.

    Args:
        cache: Policy and codec.
        positions: Kind of `tfkv.architecture.Positions`.

    Raises:
        ConfigError: They do not fit; says what would.
    """
    if positions == "rope":
        return
    policy = cache.policy
    if policy.furthest is not None:
        raise ConfigError(
            f"{policy.name!r} looks at the first tokens from elsewhere, which only rotary "
            f"positions allow, and this model has {positions!r} positions. Received: "
            f"cache={str(cache)!r}. Choose 'sliding_window' with sinks, within the trained "
            "context."
        )
    if positions == "alibi" and (policy.extrapolates or policy.selects):
        raise ConfigError(
            f"{policy.name!r} goes by scores without ALiBi's slopes, and this model has them. "
            f"Received: cache={str(cache)!r}. Choose 'snapkv', 'tova' or 'key_diff', which look "
            "at scores as they are, or at none."
        )
