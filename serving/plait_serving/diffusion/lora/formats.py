"""Parsing a LoRA file: safetensors in, factors matched to a family's modules out. Nothing is dropped silently.

Every key is understood or the file is refused, with the offending keys in the message. `kinds` says what the factors
of LoRA, LoHa, LoKr and DoRA add to a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora import container, reading
from plait_serving.diffusion.lora.keys import LoraFormat, TensorRole, meaning, reject_unsupported
from plait_serving.diffusion.lora.kinds import AnyFactor
from plait_serving.diffusion.lora.metadata import AlphaRules
from plait_serving.diffusion.lora.source import ADAPTER_FILE
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef

MAX_FILE_BYTES = 4 << 30
"""A rank-256 LoRA of every SDXL layer has some 1.7 GB."""

_LISTED = 8
_tokens = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedLora:
    """A parsed LoRA file in host memory (`protocols.LoraWeights`). `token` is unique to every file ever parsed."""

    name: str
    format: LoraFormat
    factors: Mapping[ModuleRef, AnyFactor]
    nbytes: int
    token: int = field(default_factory=lambda: next(_tokens))

    @property
    def touches_text_encoder(self) -> bool:
        """Whether it changes the prompt's encoding."""
        return any(ref.component != "unet" for ref in self.factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan:
    """The modules of a header with their keys, all matched, shapes checked. No tensor was read."""

    format: LoraFormat
    parts: Mapping[ModuleRef, Mapping[TensorRole, str]]
    rules: AlphaRules


def parse(name: str, path: Path, targets: LoraTargets, *, max_bytes: int = MAX_FILE_BYTES) -> LoadedLora:
    """Read a whole file. Raises `LoraError` with a message that starts with the LoRA's name."""
    try:
        config = AlphaRules.beside(path) if path.name == ADAPTER_FILE else None
        plan(container.inspect(path, max_bytes=max_bytes), targets, config)
        header, data = container.read(path, max_bytes=max_bytes)
        agreed = plan(header, targets, config)  # again, of the very bytes that were read
        factors = {
            ref: reading.factor(
                ref, {role: container.tensor(header, data, key) for role, key in roles.items()}, agreed.rules
            )
            for ref, roles in agreed.parts.items()
        }
    except LoraError as error:
        raise LoraError(f"LoRA {name!r}: {error.message}", param="loras") from error
    return LoadedLora(name=name, format=agreed.format, factors=MappingProxyType(factors), nbytes=len(data))


def plan(header: container.Header, targets: LoraTargets, config: AlphaRules | None = None) -> LoraPlan:
    """Match every key of a header to a module. `config` stands beside the file, if it does. Raises `LoraError`."""
    keys = header.tensors.keys()
    if not keys:
        raise LoraError("the file holds no tensors")
    reject_unsupported(keys, has_config=config is not None)
    found = {key: meaning(key, targets) for key in keys}
    unmatched = sorted(key for key, what in found.items() if what is None)
    if unmatched:
        raise LoraError(f"{len(unmatched)} of {len(keys)} keys match nothing in this model: {listed(unmatched)}")
    parts: dict[ModuleRef, dict[TensorRole, str]] = {}
    formats = set()
    for key, what in found.items():
        assert what is not None
        formats.add(what.format)
        roles = parts.setdefault(what.ref, {})
        if what.role in roles:
            raise LoraError(f"{roles[what.role]} and {key} both mean {what.ref}")
        roles[what.role] = key
    if len(formats) > 1:
        raise LoraError("the file mixes kohya and PEFT keys")
    rules = config or AlphaRules.of(header.metadata)
    for ref, roles in parts.items():
        reading.check(ref, roles, header, targets.shapes[ref], rules)
    return LoraPlan(format=formats.pop(), parts=parts, rules=rules)


def listed(keys: Iterable[str]) -> str:
    """Return the first few keys, and the number of the others, as text."""
    keys = list(keys)
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return ", ".join(keys[:_LISTED]) + more
