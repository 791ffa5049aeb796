"""Keep more in heads that look far, less in those that do not."""

from __future__ import annotations

import dataclasses

from tfkv.layers.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV whose heads share one budget a layer.

    Choose it over SnapKV once the model is calibrated. The paper shares out anew for each
    prompt; here a table of the calibration does, so that all shapes are known beforehand.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Feng et al., Ada-KV, https://arxiv.org/abs/2407.11550, and its code,
        https://github.com/FFY0/AdaKV.
    """

    name = "ada_kv"
    caps: str = "ada_kv"
