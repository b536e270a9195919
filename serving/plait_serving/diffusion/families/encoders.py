"""Text encoders as residents of their own: in memory once for all base models with equal weights, each answer kept for
the next request with the same text.

Those that no LoRA set is merged into, as T5, leave memory between two texts where it is short, and come back for the
next text that is not remembered.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.factors import Kept
from plait_serving.diffusion.loading import load_module, translate
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.protocols import Conditioning
from plait_serving.diffusion.weight_files import WeightFiles

_KEPT_CALLS, _KEPT_SHARE, _KEPT_BYTES = 1024, 64, 1 << 20
"""So many answers, and of all but the newest such a share of what the encoders take (of T5-XXL in bfloat16 149 MB: 35
texts of 512 tokens), or of small ones so many bytes. Negative prompts and retries recur."""
_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures")
"""What configurations of equal encoders may differ in."""


class Call(NamedTuple):
    """One text encoder call: the part of the model, what it reads, and the layers that it leaves out (`clip_skip`).

    Of CLIP the layer before the last one left is read as it is, or, if it `is_last`, the last one after the final norm.
    `seen`: how many ids a mask shows; None: all. `weights`: one for each id, if any is not 1.
    """

    part: str
    ids: tuple[int, ...]
    skip: int = 0
    is_last: bool = False
    seen: int | None = None
    weights: tuple[float, ...] | None = None


class EncodedText(NamedTuple):
    """`hidden (1, L, C)`, and of CLIP `pooled (1, P)`."""

    hidden: torch.Tensor
    pooled: torch.Tensor | None


Outputs: TypeAlias = Mapping[Call, EncodedText]


class TextEncoding:
    """A request's calls on their way through the text encoders. Compute thread only.

    Its text encoders must have the same weights at every call; between two calls they may change for others.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        *,
        run: Callable[[Call], EncodedText],
        finish: Callable[[Outputs], Conditioning],
    ) -> None:
        """`finish` makes the conditioning of what the calls returned."""
        self._left = deque(dict.fromkeys(calls))
        self._run, self._finish = run, finish
        self._done: dict[Call, EncodedText] = {}

    @property
    def calls_left(self) -> int:
        """How many text encoder calls are left to make."""
        return len(self._left)

    def advance(self) -> Conditioning | None:
        """Make one text encoder call; return the conditioning if it was the last."""
        if self._left:
            call = self._left.popleft()
            self._done[call] = self._run(call)
        return None if self._left else self._finish(self._done)


def tokenizer_of(folder: Path, part: str, kind: Any) -> Any:
    """Return the tokenizer, of a class, beside a text encoder of a model's folder. Raises `ModelError`."""
    path = folder / part.replace("text_encoder", "tokenizer")
    if not path.is_dir():
        raise ModelError(f"{path}: missing")
    return translate(path, partial(kind.from_pretrained, local_files_only=True))


class WeightedPart(NamedTuple):
    """A part of a model's folder: its class, its weights, what it computes in, and of a text encoder its
    configuration."""

    kind: Any
    files: WeightFiles
    dtype: torch.dtype
    config: Any = None

    @property
    def nbytes(self) -> int:
        """What its weights take in memory."""
        return self.files.nbytes_as(self.dtype)

    def load(self, device: torch.device) -> nn.Module:
        """Return it with its weights. Raises `ModelError`."""
        return load_module(self.kind, self.files, self.dtype, device)

    def mapped(self) -> nn.Module:
        """Return it with its files' own bytes, memory-mapped: it takes no memory of its own. Raises `ModelError`."""
        return load_module(self.kind, self.files, self.files.stored_dtype, torch.device("cpu"))

    @property
    def likeness(self) -> object:
        """What text encoders with equal weights agree in, without reading any."""
        config = {key: value for key, value in self.config.to_dict().items() if key not in _SAYS_NOTHING}
        tensors = sorted((name, info.dtype, info.shape) for name, (_, info) in self.files.tensors.items())
        return self.kind, self.dtype, json.dumps(config, sort_keys=True, default=str), tuple(tensors)

    @property
    def sums(self) -> tuple[str, ...]:
        """The SHA-256 of each of its files."""
        stats = ((path, path.stat()) for path in self.files.files)
        return tuple(_sum(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


Parts: TypeAlias = Mapping[str, WeightedPart]
"""By their folder's name."""


class TextEncoders:
    """Text encoders with one merger of LoRA sets, which is of this loading, and the models that hold them. `hold`,
    `let_go` and `nbytes_for` are for any thread, the rest is the compute thread's."""

    def __init__(self, parts: Parts, *, device: torch.device, adapts: bool, among: SharedEncoders) -> None:
        """Nothing is loaded. `adapts`: LoRA sets are merged into them, so they stay. `among`: those that leave for
        each other."""
        self.parts, self.adapts = parts, adapts
        self.nbytes = sum(part.nbytes for part in parts.values())
        self.device, self._among = device, among
        self._holders: WeakKeyDictionary[object, Parts] = WeakKeyDictionary()  # models hold these
        self._modules: Mapping[str, nn.Module] = {}
        self._lock = threading.Lock()
        self._forget()

    def is_like(self, other: TextEncoders) -> bool:
        """Return whether they have equal weights; reads those if nothing else tells."""
        if (self.device, self.adapts, [*self.parts]) != (other.device, other.adapts, [*other.parts]):
            return False
        pairs = [(part, other.parts[name]) for name, part in self.parts.items()]
        try:
            return all(mine.likeness == its.likeness for mine, its in pairs) and all(
                mine.sums == its.sums for mine, its in pairs
            )
        except OSError:  # the other model's folder has gone
            return False

    def hold(self, model: object, parts: Parts) -> None:
        """Bring the weights into memory for a model, from its own files. Raises `ModelError`."""
        with self._lock:
            self._holders[model] = parts
            if not self._modules:
                self._load(parts)

    def let_go(self, model: object) -> None:
        """Forget a model, which has left; with the last one the weights go, and what is remembered."""
        with self._lock:
            self._holders.pop(model, None)
            if not self._holders:
                self._forget()

    def leave(self) -> None:
        """Leave memory until the next text, if no LoRA set may be merged into them, nor is anybody loading them."""
        if not self.adapts and self._lock.acquire(blocking=False):
            self._modules = {}
            self._lock.release()

    def nbytes_for(self, model: object, *, left: bool) -> int:
        """Return a model's share of what they take in memory, or what they would take more with it. `left`: once those
        have left that can."""
        if left and not self.adapts:
            return 0
        if model in self._holders:
            return self.nbytes // max(1, len(self._holders)) if self._modules else 0
        return 0 if self._modules else self.nbytes

    def run(self, call: Call) -> EncodedText:
        """Make a call with the current weights, or remember its result."""

        def make() -> tuple[EncodedText, int]:
            found = self._encode(call)
            return found, sum(part.nbytes for part in found if part is not None)

        return self._kept.get((self.merger.current, call), make)

    @torch.inference_mode()
    def _encode(self, call: Call) -> EncodedText:
        """Encode one row, as diffusers does."""
        module: Any = self._module(call.part)
        ids = torch.tensor([call.ids], device=self.device)
        if module.config.model_type == "t5":
            return EncodedText(module(ids, output_hidden_states=False)[0].to(module.dtype), None)
        mask = None if call.seen is None else (torch.arange(len(call.ids), device=self.device) < call.seen).long()[None]
        output = module(ids, attention_mask=mask, output_hidden_states=True)
        pooled = output.pooler_output if hasattr(output, "pooler_output") else output.text_embeds
        hidden = output.hidden_states[-(call.skip + (1 if call.is_last else 2))]
        if call.is_last:
            body = getattr(module, "text_model", module)  # transformers 5 dropped this level
            hidden = body.final_layer_norm(hidden) if call.skip else output.last_hidden_state
        return EncodedText(hidden if call.weights is None else _weighted(hidden, call.weights), pooled)

    def _module(self, part: str) -> nn.Module:
        with self._lock:
            if not self._modules:
                self._among.leave()  # they left because memory is short
                self._load(next(iter(self._holders.values())))
            return self._modules[part]

    def _load(self, parts: Parts) -> None:
        self._modules = {name: part.load(self.device) for name, part in parts.items()}
        if self.adapts:
            self.merger = Merger(self._modules)

    def _forget(self) -> None:
        self._modules = {}
        self.merger = Merger({})
        self._kept: Kept[EncodedText] = Kept(_KEPT_CALLS, max(_KEPT_BYTES, self.nbytes // _KEPT_SHARE))


class SharedEncoders:
    """The text encoders of an engine's models. Thread-safe."""

    def __init__(self) -> None:
        self._known: WeakSet[TextEncoders] = WeakSet()
        self._lock = threading.Lock()

    def like(self, own: TextEncoders) -> TextEncoders:
        """Return those that are known with the weights of `own`, else `own`, known from now on."""
        found = next((other for other in self._all() if other is own or other.is_like(own)), own)
        with self._lock:
            self._known.add(found)
        return found

    def leave(self) -> None:
        """Let all leave memory that can (`TextEncoders.leave`). Compute thread only."""
        for each in self._all():
            each.leave()

    def _all(self) -> list[TextEncoders]:
        with self._lock:
            return list(self._known)


def _weighted(hidden: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return `hidden (1, T, C)` with each token times its weight, brought back to the mean that it had: A1111's
    default emphasis ("Original"), chunk by chunk and text encoder by text encoder."""
    scaled = hidden * torch.tensor(weights, dtype=hidden.dtype, device=hidden.device)[None, :, None]
    return scaled * (hidden.mean() / scaled.mean())


@cache
def _sum(path: Path, *_: int) -> str:
    """Return the SHA-256 of a file, once for each state of it: what follows is its inode, size and time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
