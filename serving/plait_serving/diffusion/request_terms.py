"""What a family says of requests for a model: what they may say, and what they come to. No torch: it crosses to the
ingress."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from plait_serving.diffusion.values import ImageRequest, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChoice:
    """Which samplers a model takes, and the one of requests that name none. `spaced`: those whose spacing of noise
    levels a request may choose (`Sigmas`); `starts`: those that can start from an image, the default among them."""

    among: tuple[Scheduler, ...] = tuple(Scheduler)
    default: Scheduler = Scheduler.EULER
    spaced: tuple[Scheduler, ...] = ()
    starts: tuple[Scheduler, ...] = tuple(Scheduler)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """What requests for a model may say, and what they get if they do not.

    `takes`: of the fields that only some models have a use for (`RequestField.only_some`), those that mean something to
    this one, by the engine's names. `steps` and `guidance_scale`: of requests that give none. `edits`: it can start
    from an image. `rounds_up`: its edits do (`Edit`). `reads_images`: that of an edit without a mask is a reference,
    which it reads instead.
    """

    samplers: SamplerChoice = field(default_factory=SamplerChoice)
    takes: frozenset[str] = frozenset()
    steps: int = 20
    guidance_scale: float = 7.5
    edits: bool = True
    rounds_up: bool = False
    reads_images: bool = False

    def settled(self, request: ImageRequest) -> ImageRequest:
        """Return a request whose edit runs as many steps as with this model."""
        edit = request.edit
        if edit is None or edit.rounds_up is self.rounds_up:
            return request
        return replace(request, edit=replace(edit, rounds_up=self.rounds_up))


@dataclass(frozen=True, slots=True)
class RowKind:
    """What decides how long a row of a call takes: its `size` in the family's unit, pixels or tokens, and of how many
    `branches` it is one."""

    size: int
    branches: int = 1

    @property
    def work(self) -> float:
        """Its work relative to other rows of the model, roughly."""
        return float(self.size * self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """What a request comes to, as its family counts.

    Its prompts' `words` by field, without begin, end and padding, and the `chunks` of all that text encoders read.
    `shape`: what requests for one model must agree in to share a denoiser call. Each image is `rows` rows of a call, of
    the kind `row`; `controls`: what its ControlNets add to their work, as a share.
    """

    words: Mapping[str, int]
    chunks: int
    shape: Hashable
    row: RowKind
    rows: int = 1
    controls: float = 0.0
