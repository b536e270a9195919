"""Alpha and rank rules that stand beside the tensors.

diffusers' `save_lora_weights` writes them into a file's metadata (`lora_adapter_metadata`, a LoraConfig per part), each
field with its component before it: `unet.lora_alpha`, `text_encoder.rank_pattern`, ... PEFT's `save_pretrained` writes
an `adapter_config.json` beside the file, of the model that steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.listing import CONFIG_FILE
from plait_serving.diffusion.lora.targets import ModuleRef

KEY = "lora_adapter_metadata"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_DIGITS = 19
"""Of an integer: 2^63 has as many. Python's integers have no largest one, and arithmetic with long ones holds the
interpreter."""
_PEFT_KINDS = ("LORA", "LOHA", "LOKR")

# Switches under which an adapter computes something else than its tensors say.
_UNSUPPORTED = ("lora_bias", "fan_in_fan_out", "use_qalora", "alora_invocation_tokens", "megatron_config")


@dataclass(frozen=True, slots=True)
class AlphaRules:
    """Each component's configuration. Empty: alpha is the rank, diffusers' convention for files without one."""

    configs: Mapping[str, Mapping[str, Any]]

    @classmethod
    def beside(cls, path: Path, component: str) -> AlphaRules | None:
        """Read the configuration that PEFT wrote beside an adapter of a component; None: there is none. Raises
        `LoraError`."""
        try:
            with (path.parent / CONFIG_FILE).open("rb") as file:
                raw = file.read(_MAX_CONFIG_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LoraError(f"its {CONFIG_FILE} cannot be read ({error.strerror})") from error
        if len(raw) > _MAX_CONFIG_BYTES:
            raise LoraError(f"its {CONFIG_FILE} has more than {_MAX_CONFIG_BYTES} bytes")
        config = _table(raw, CONFIG_FILE)
        if config.get("peft_type") not in _PEFT_KINDS:
            raise LoraError(
                f"its {CONFIG_FILE} has the peft_type {config.get('peft_type')!r}, not {', '.join(_PEFT_KINDS)}"
            )
        if config.get("bias", "none") != "none" or config.get("modules_to_save"):
            raise LoraError(f"its {CONFIG_FILE} has bias or modules_to_save, which are not read")
        return cls._checked({component: config})

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> AlphaRules:
        """Parse a file's metadata. Raises `LoraError` for invalid JSON or features that are not read."""
        raw = metadata.get(KEY)
        if not raw:
            return cls(MappingProxyType({}))
        configs: dict[str, dict[str, Any]] = {}
        for key, value in _table(raw, f"metadata {KEY}").items():
            component, _, field = key.partition(".")
            configs.setdefault(component, {})[field] = value
        return cls._checked(configs)

    @classmethod
    def _checked(cls, configs: Mapping[str, Mapping[str, Any]]) -> AlphaRules:
        for component, config in configs.items():
            switched_on = [name for name in _UNSUPPORTED if config.get(name)]
            if switched_on:
                raise LoraError(f"{component} was trained with {', '.join(switched_on)}, which is not read")
            if any(not isinstance(config.get(name) or {}, dict) for name in ("alpha_pattern", "rank_pattern")):
                raise LoraError(f"{component} has an alpha_pattern or rank_pattern that is no table")
        return cls(MappingProxyType(dict(configs)))

    def decomposes(self, ref: ModuleRef) -> bool:
        """Return whether a module's component was trained as DoRA."""
        return bool(self.configs.get(ref.component, {}).get("use_dora"))

    def rank(self, ref: ModuleRef) -> int | None:
        """Return the rank that a component's configuration names for a module; None: there is none."""
        config = self.configs.get(ref.component)
        if not config or "r" not in config:
            return None
        rank = _by_pattern(config.get("rank_pattern") or {}, ref.module, config["r"])
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise LoraError(f"its metadata gives {ref} the rank {rank!r}")
        return rank

    def alpha(self, ref: ModuleRef, rank: int) -> float:
        """Return the alpha of a module without an alpha key; for rank-stabilised LoRAs, the alpha that plain alpha/r
        needs."""
        config = self.configs.get(ref.component)
        if not config:
            return float(rank)
        alpha = _by_pattern(
            config.get("alpha_pattern") or {}, ref.module, config.get("lora_alpha", config.get("alpha", rank))
        )
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise LoraError(f"its metadata gives {ref} the alpha {alpha!r}")
        return float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


def _table(raw: str | bytes, where: str) -> dict[str, Any]:
    try:
        table = json.loads(raw, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise LoraError(f"its {where} is no JSON ({error})") from error
    if not isinstance(table, dict):
        raise LoraError(f"its {where} is no table")
    return table


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(f"the integer {digits[:_MAX_DIGITS]}... has {len(digits)} digits")
    return int(digits)


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
