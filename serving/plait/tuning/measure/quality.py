"""How far a configuration's answers are from the default's: `quality_drift`, for jobs that limit it.

The first requests of every scenario are sent one after the other before the load, the same ones for every
configuration. The default's answers are kept in the job's folder and compared with those of any other configuration:
for images by the mean difference of their channels (0: equal, 1: black against white), for scores by the largest
difference. The largest drift counts. Knobs that should not change answers (replicas, threads, windows) show the
effect of chance and rounding.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx2
import numpy as np
import numpy.typing as npt

from plait.errors import PlaitError, told
from plait_loadtest.plan import make_plan
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import PreparedRequest

QUALITY_DRIFT = "quality_drift"
"""The metric's name."""

_PROBES = 4
"""The number of requests per scenario: an image may take a second, and a trial that needs no restart should add two."""

_TIMEOUT_S = 120.0
_FILE = "default-answers.npz"
_HEADER_LENGTH = "inference-header-content-length"

Answers: TypeAlias = dict[str, npt.NDArray[np.float32]]


class NoAnswer(PlaitError):
    """A probe was not answered: the configuration does not work, or the default's answers are missing."""


def quality_drift(scenarios: Sequence[Scenario], folder: Path, *, is_default: bool) -> float:
    """Return the drift of the running configuration. `scenarios`: with their address. The default's answers are stored
    in `folder` on first use. Raises `NoAnswer`, `ScenarioError`."""
    answers = {name: values for scenario in scenarios for name, values in _asked(scenario).items()}
    path = folder / _FILE
    if is_default and not path.exists():
        with path.with_suffix(".partial").open("wb") as file:
            np.savez(file, allow_pickle=False, **answers)
        path.with_suffix(".partial").rename(path)
    if not path.exists():
        raise NoAnswer("the default has not answered yet, so nothing can be compared with it")
    with np.load(path, allow_pickle=False) as kept:
        return max(_difference(name, kept, values) for name, values in answers.items())


def _difference(name: str, kept: Mapping[str, Any], values: npt.NDArray[np.float32]) -> float:
    if name not in kept or kept[name].shape != values.shape:
        raise NoAnswer(f"{name}: the default's answer has another form")
    away = np.abs(kept[name] - values)
    return float(away.mean() if values.ndim == 3 else away.max(initial=0.0))


def _asked(scenario: Scenario) -> Answers:
    """Return the answers to the scenario's probes, by probe name."""
    mix = make_plan(scenario).mix
    found: dict[str, npt.NDArray[np.float32]] = {}
    for index in range(_PROBES):
        request = mix.build(index)
        answer = _ask(scenario, request.path, request)
        parts = _images(scenario, answer) if scenario.target.api == "images" else _scores(answer)
        found |= {f"{scenario.name}-{index}-{name}": values for name, values in parts.items()}
    return found


def _ask(scenario: Scenario, path: str, request: PreparedRequest | None = None) -> httpx2.Response:
    """Return an answer. Through a proxy it would be another way than the load's, or none."""
    target, more = scenario.target, {} if request is None else dict(request.headers)
    method, body = ("GET", None) if request is None else (request.method, request.body)
    headers = {**target.headers, **more}
    with told(httpx2.HTTPError, about="a probe was not answered", to=NoAnswer):
        answer = httpx2.request(
            method, f"{target.url}{path}", content=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )
    if not answer.is_success:
        raise NoAnswer(f"a probe was answered with {answer.status_code}: {answer.text[:300]}")
    return answer


def _images(scenario: Scenario, answer: httpx2.Response) -> dict[str, npt.NDArray[np.float32]]:
    """Return the channels of each image, 0 to 1: (height, width, 3). Where an answer has an address, which may be the
    one that clients elsewhere see, the image is fetched from the service that is measured."""
    from PIL import Image

    images = [
        base64.b64decode(it["b64_json"]) if "b64_json" in it else _ask(scenario, urlsplit(it["url"]).path).content
        for it in answer.json()["data"]
    ]
    return {
        f"picture-{i}": np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.float32) / 255.0
        for i, data in enumerate(images)
    }


def _scores(answer: httpx2.Response) -> dict[str, npt.NDArray[np.float32]]:
    """Return each output as one row, from JSON or from JSON followed by binary FP32 tensors."""
    body = answer.content
    end = int(answer.headers.get(_HEADER_LENGTH, len(body)))
    found = {}
    for output in json.loads(body[:end])["outputs"]:
        nbytes = output.get("parameters", {}).get("binary_data_size")
        if nbytes is None:
            found[output["name"]] = np.asarray(output["data"], np.float32).reshape(-1)
        else:
            found[output["name"]] = np.frombuffer(body, np.float32, nbytes // 4, end)
            end += nbytes
    return found
