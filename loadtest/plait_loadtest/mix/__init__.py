"""Which requests a scenario sends: request i is a pure function of (scenario, i), whichever process builds it."""

from __future__ import annotations

from typing import TypeAlias

from plait_loadtest.distributions import Floats, WeightedChoice
from plait_loadtest.mix.images import ImageRequests, read_file
from plait_loadtest.mix.infer import InferRequests
from plait_loadtest.scenario import ImageClass, InferClass, LoadTarget, MixClass, RawClass, Scenario
from plait_loadtest.seeds import Chunks, Numbered, Stream
from plait_loadtest.values import PreparedRequest

__all__ = ["RequestMix"]

_MARK = "{index}"


class RawRequests:
    """Builds the requests of one class of arbitrary ones: method, path and body as written, but `{index}` becomes the
    request's number. One without it is the same object each time."""

    def __init__(self, spec: RawClass, target: LoadTarget) -> None:
        self._method = spec.method
        self._path = (spec.path or target.path or "/").split(_MARK)
        body = read_file("body_file", spec.body_file) if spec.body_file else spec.body.encode()
        self._body = body.split(_MARK.encode())
        more = tuple((name.lower(), value) for name, value in spec.headers.items())
        self._headers = ((("content-type", spec.content_type),) if self._body != [b""] else ()) + more
        self._constant = self._prepare(0) if len(self._path) == len(self._body) == 1 else None

    def build(self, index: int) -> PreparedRequest:
        """Return the request with its number filled in."""
        return self._constant or self._prepare(index)

    def _prepare(self, index: int) -> PreparedRequest:
        number = str(index)
        return PreparedRequest(
            method=self._method,
            path=number.join(self._path),
            headers=self._headers,
            body=number.encode().join(self._body),
        )

    def asked(self, index: int) -> int:  # noqa: ARG002
        """Return 0: what an answer should hold is the scenario's to say (`target.check`)."""
        return 0


ClassRequests: TypeAlias = ImageRequests | InferRequests | RawRequests


class RequestMix:
    """The requests of a scenario by index: the same scenario and index give the same bytes in every process. Drawn in
    chunks: one chunk of kinds for all classes, one of details for each class. Reads the files that it names; raises
    `ScenarioError` if one cannot be read."""

    def __init__(self, scenario: Scenario) -> None:
        self._names = tuple(spec.name for spec in scenario.mix)
        self._kind = WeightedChoice(dict(enumerate(spec.weight for spec in scenario.mix)))
        self._kinds = Chunks(Numbered(scenario.seed, Stream.MIX), 1, self._draw_kinds)
        self._requests = [
            _requests(spec, scenario.target, scenario.seed, position) for position, spec in enumerate(scenario.mix)
        ]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the request classes."""
        return self._names

    def kind(self, index: int) -> int:
        """Return the class of request `index`, without building it."""
        return self._kinds[index]

    def build(self, index: int) -> PreparedRequest:
        """Return the request, built by its class."""
        return self._requests[self.kind(index)].build(index)

    def asked(self, index: int) -> int:
        """Return how many images or outputs request `index` asks for; 0: nobody can tell."""
        return self._requests[self.kind(index)].asked(index)

    def _draw_kinds(self, uniforms: Floats) -> list[int]:
        return self._kind.pick(uniforms[:, 0])


def _requests(spec: MixClass, target: LoadTarget, seed: int, position: int) -> ClassRequests:
    """Return the requests of a class. RNG streams follow its position, so that classes draw independently."""
    details = Numbered(seed, Stream.MIX, position, 0)
    if isinstance(spec, ImageClass):
        return ImageRequests(spec, target, details)
    if isinstance(spec, InferClass):
        return InferRequests(spec, target, details, Numbered(seed, Stream.MIX, position, 1))
    return RawRequests(spec, target)
