"""Parsing a LoRA file: safetensors in, factors matched to a family's modules out. Nothing is dropped silently.

Every key is understood or the file is refused, with the offending keys in the message; but OneTrainer's bundled
embeddings are left out, which the log says. `kinds` says what the factors of LoRA, LoHa, LoKr and DoRA add to a weight.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora import container, reading
from plait_serving.diffusion.lora.key_formats import format_of, is_text
from plait_serving.diffusion.lora.keys import (
    TensorRole,
    adds,
    may_add_nothing,
    meaning,
    other_model,
    reject_unsupported,
)
from plait_serving.diffusion.lora.kinds import Factor, section
from plait_serving.diffusion.lora.listing import ADAPTER_FILE
from plait_serving.diffusion.lora.metadata import AlphaRules
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef

MAX_FILE_BYTES = 4 << 30
"""A rank-256 LoRA of every SDXL layer has some 1.7 GB."""

_log = logging.getLogger(__name__)

_EMBEDDINGS = "bundle_emb."  # OneTrainer: textual inversions that were trained with the LoRA
_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedLora:
    """A parsed LoRA file in host memory. Equal tokens mean equal content."""

    name: str
    factors: Mapping[ModuleRef, Factor]
    nbytes: int
    token: Hashable = field(default_factory=object)

    @property
    def touches_text_encoder(self) -> bool:
        """Whether it changes the prompt's encoding."""
        return any(is_text(ref.component) for ref in self.factors)


def parse(name: str, path: Path, targets: LoraTargets, *, max_bytes: int = MAX_FILE_BYTES) -> LoadedLora:
    """Read a whole file. Raises `LoraError` with a message that starts with the LoRA's name."""
    try:
        config = AlphaRules.beside(path, targets.denoiser) if path.name == ADAPTER_FILE else None
        with container.opened(path, max_bytes=max_bytes) as (header, read):
            parts, beyond = _matched(header, targets, has_config=config is not None)
            rules = config or AlphaRules.of(header.metadata)
            data = read()
        _check_adds_nothing(beyond, header, data, targets)
        factors: dict[ModuleRef, Factor] = {}
        for ref, roles in parts.items():
            tensors = {role: _tensor(header, data, key, role) for role, key in roles.items()}
            whole = reading.factor(ref, roles, tensors, targets.parameters[ref], rules)
            rows = targets.joined.get(ref)
            factors |= {ref: whole} if rows is None else {part: section(whole, mine) for part, mine in rows.items()}
    except LoraError as error:
        raise LoraError(f"LoRA {name!r}: {error.message}", param="loras") from error
    if bundled := _bundled(header):
        _tell_of_embeddings(name, bundled)
    return LoadedLora(name=name, factors=MappingProxyType(factors), nbytes=len(data))


def _bundled(header: container.Header) -> tuple[str, ...]:
    """Return the placeholders of the embeddings in a file, which are not used."""
    return tuple(dict.fromkeys(key.split(".")[1] for key in header.tensors if key.startswith(_EMBEDDINGS)))


def _matched(
    header: container.Header, targets: LoraTargets, *, has_config: bool
) -> tuple[Mapping[ModuleRef, Mapping[TensorRole, str]], Collection[str]]:
    """Match every key of a header to a module; return the keys of each, and those of layers that only ComfyUI's text
    encoders have. `has_config`: an adapter's configuration stands beside the file. Raises `LoraError`."""
    keys = [key for key in header.tensors if not key.startswith(_EMBEDDINGS)]
    if not keys:
        raise LoraError("the file is a textual inversion" if header.tensors else "the file holds no tensors")
    found = {key: meaning(key, targets) for key in keys}
    reject_unsupported(found, has_config=has_config)
    unknown = {key: may_add_nothing(key) for key, what in found.items() if what is None}
    if len(unknown) == len(keys) or not all(unknown.values()):
        raise _unmatched([key for key, excused in unknown.items() if not excused] or unknown, keys, targets)
    parts: dict[ModuleRef, dict[TensorRole, str]] = {}
    for key, what in found.items():
        if what is None:
            continue
        roles = parts.setdefault(what.ref, {})
        if what.role in roles:
            raise LoraError(f"{roles[what.role]} and {key} both mean {what.ref}")
        roles[what.role] = key
    _check_apart(parts, targets)
    formats = {format_of(key) for key, what in found.items() if what is not None}
    if len(formats) > 1:
        titles = sorted((form.title for form in formats), key=str.casefold)
        raise LoraError(f"the file mixes {' and '.join(titles)} keys")
    return parts, unknown.keys()


def _tensor(header: container.Header, data: bytearray, key: str, role: TensorRole) -> torch.Tensor:
    is_alpha = role is TensorRole.ALPHA
    return container.tensor(header, data, key, container.ALPHA_DTYPES if is_alpha else container.DTYPES)


def _check_apart(parts: Mapping[ModuleRef, Mapping[TensorRole, str]], targets: LoraTargets) -> None:
    """Raise `LoraError` if a file changes a module both as such and as a part of an original layer."""
    seen: dict[ModuleRef, str] = {}
    for ref, roles in parts.items():
        key = next(iter(roles.values()))
        for part in targets.joined.get(ref, (ref,)):
            if part in seen:
                raise LoraError(f"{seen[part]} and {key} both mean {part}")
            seen[part] = key


def _check_adds_nothing(
    beyond: Collection[str], header: container.Header, data: bytearray, targets: LoraTargets
) -> None:
    """Raise `LoraError` if a layer that this model lacks would be changed."""
    surplus = [key for key in beyond if adds(key) and bool(container.tensor(header, data, key).any())]
    if surplus:
        raise _unmatched(surplus, header.tensors, targets)


def _unmatched(unmatched: Iterable[str], keys: Collection[str], targets: LoraTargets) -> LoraError:
    unmatched = sorted(unmatched)
    other = other_model(unmatched, targets)
    layout = f"the nearest layout is that of {format_of(*unmatched).title}"
    return LoraError(
        f"{len(unmatched)} of {len(keys)} keys match nothing in this model "
        f"({layout if other is None else f'the file is for {other}'}): {listed(unmatched)}"
    )


@functools.cache
def _tell_of_embeddings(name: str, placeholders: tuple[str, ...]) -> None:
    """Log it once for each LoRA."""
    words = listed([repr(word) for word in placeholders])
    _log.warning("LoRA %r: the embeddings that its file has for %s (%s*) are not used", name, words, _EMBEDDINGS)


def listed(keys: Iterable[str]) -> str:
    """Return the first few keys, and the number of the others, as text."""
    keys = list(keys)
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return ", ".join(keys[:_LISTED]) + more
