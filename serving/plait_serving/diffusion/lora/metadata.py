"""Alpha and rank rules that diffusers writes into a file's metadata (`lora_adapter_metadata`, a LoraConfig per part).

diffusers' `save_lora_weights` prefixes each LoraConfig field with its component: `unet.lora_alpha`,
`text_encoder.rank_pattern`, ...
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from plait_fabric.bounded import load_json
from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.targets import ModuleRef

KEY = "lora_adapter_metadata"

# LoraConfig switches under which B@A * alpha/r is not what the adapter computes.
_UNSUPPORTED = ("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "alora_invocation_tokens", "megatron_config")


@dataclass(frozen=True, slots=True)
class AlphaRules:
    """Each component's LoraConfig. Empty: alpha is the rank, diffusers' convention for files without one."""

    configs: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> AlphaRules:
        """Parse a file's metadata. Raises `LoraError` for invalid JSON or features beyond a plain LoRA."""
        raw = metadata.get(KEY)
        if not raw:
            return cls(MappingProxyType({}))
        try:
            table = load_json(raw)
        except (ValueError, RecursionError) as error:
            raise LoraError(f"its metadata {KEY} is no JSON ({error})") from error
        if not isinstance(table, dict):
            raise LoraError(f"its metadata {KEY} is no table")
        configs: dict[str, dict[str, Any]] = {}
        for key, value in table.items():
            component, _, field = key.partition(".")
            configs.setdefault(component, {})[field] = value
        for component, config in configs.items():
            switched_on = [name for name in _UNSUPPORTED if config.get(name)]
            if switched_on:
                raise LoraError(f"{component} was trained with {', '.join(switched_on)}; only plain LoRAs are read")
        return cls(MappingProxyType(configs))

    def alpha(self, ref: ModuleRef, rank: int) -> float:
        """Return the alpha of a module without an alpha key; for rank-stabilised LoRAs, the alpha that plain alpha/r
        needs."""
        config = self.configs.get(ref.component)
        if not config:
            return float(rank)
        alpha = _by_pattern(config.get("alpha_pattern") or {}, ref.module, config.get("lora_alpha", rank))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise LoraError(f"its metadata gives {ref} the alpha {alpha!r}")
        return float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Apply PEFT's rule (`get_pattern_key`): the first pattern that is the module's path, or its end after a dot."""
    for pattern, value in patterns.items():
        if _matches(pattern, module):
            return value
    return default


def _matches(pattern: str, module: str) -> bool:
    """Match plain paths only, with PEFT's leading `^`: a regular expression from a file is not run."""
    plain = pattern.removeprefix("^").replace("\\.", ".")
    if re.search(r"[*+?()\[\]{}|$^\\]", plain):
        raise LoraError(f"its metadata has the pattern {pattern!r}; only plain module paths are read")
    anchored = pattern.startswith("^")
    # CLIP paths come with and without text_model., depending on the transformers version that trained.
    plain, module = plain.removeprefix("text_model."), module.removeprefix("text_model.")
    return module == plain or (not anchored and module.endswith(f".{plain}"))
