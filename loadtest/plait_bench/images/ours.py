"""plait inside a worker process: `plait serve` as a user starts it, asked over HTTP, and the engine without Ray and
HTTP, built like the server's."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
from PIL import Image

from plait_bench.commands import serving_plait
from plait_bench.errors import SystemFailed
from plait_bench.images.fleet import FleetWorker
from plait_bench.images.orders import ImageArray, ImageSpec, ModelFolder, control_map
from plait_loadtest.mix.control_images import control_image

if TYPE_CHECKING:
    from plait_serving.diffusion.values import ImageRequest

_HEADERS = {"content-type": "application/json"}
_ANSWER_S = 1800.0
_READY_S = 1200
_PREPARED_S = 600.0
_CONTROLNETS_S = 60.0
_SETTLED_S = 60.0
_CAUGHT_UP_S = 2.0


def configuration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plait.yaml: what is served, in which dtype, and nothing else unless a system's name says so (`knobs`,
    `executor`)."""
    models: ModelFolder = settings["models"]
    images: dict[str, Any] = {
        "model": str(models.base.resolve()),
        "dtype": settings["dtype"],
        "controlnets": {name: {"folder": str(path.resolve())} for name, path in models.controlnets.items()},
        "knobs": dict(settings.get("knobs", {})),
    }
    if models.loras:
        images["loras"] = {"folder": str((models.root / "loras").resolve())}
    if settings.get("executor"):
        images["executor"] = settings["executor"]
    server = {"port": 0, "ready_timeout_s": _READY_S}
    return {"server": server, "images": images, "recommend": None}


def body_of(order: ImageSpec) -> dict[str, Any]:
    """Return the body of the request that makes an order's image."""
    body: dict[str, Any] = {
        "prompt": order.prompt,
        "size": f"{order.edge}x{order.edge}",
        "seed": order.seed,
        "num_inference_steps": order.steps,
        "guidance_scale": order.guidance,
        "scheduler": order.scheduler,
        "loras": [{"name": name, "scale": scale} for name, scale in order.loras],
    }
    if order.control is not None:
        name, drawing = order.control
        image = base64.b64encode(control_image(drawing, order.edge, order.edge)).decode()
        body["controlnets"] = [{"name": name, "image": image}]
    return body


class Served(FleetWorker):
    """A server in processes of its own. It divides the host itself: there is one layout."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start the server and wait until it is ready. `cache`: its cache folder, the user's own if empty.

        Raises `SystemFailed`.
        """
        config, models = configuration(settings), settings["models"]
        is_torch = settings.get("executor") == "torch" or settings.get("is_transformer", False)
        self._prepares = not is_torch and config["images"]["knobs"].get("exact") != "always"
        self._controlnets = frozenset(models.controlnets)
        self._opened = ExitStack()
        self._client = self._opened.enter_context(httpx2.Client(timeout=_ANSWER_S, trust_env=False))
        scratch = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="plait-bench-"))
        file = Path(scratch) / "plait.json"  # JSON is YAML
        file.write_text(json.dumps(config), encoding="utf-8")
        environ = {"XDG_CACHE_HOME": settings["cache"]} if settings.get("cache") else {}
        _, self._url = self._opened.enter_context(serving_plait(file, environ=environ))

    def run(self, items: Sequence[ImageSpec], *, one_by_one: bool, keep: bool) -> list[ImageArray]:
        """Send the requests all at once, or one after the other."""
        bodies = [json.dumps(body_of(order)).encode() for order in items]
        with ThreadPoolExecutor(1 if one_by_one else len(bodies)) as pool:
            answers = list(pool.map(self._ask, bodies))
        return [_pixels(answer) for answer in answers] if keep else []

    def resumed(self) -> None:
        """Wait until the server is healthy again, and its processes have caught up with the time that they missed."""
        until_s = time.monotonic() + _SETTLED_S
        while True:
            with suppress(httpx2.TransportError):
                if self._client.get(f"{self._url}/health", timeout=_SETTLED_S).status_code == httpx2.codes.OK:
                    break
            if time.monotonic() > until_s:
                raise SystemFailed("plait was stopped and continued, and is not healthy")
            time.sleep(0.5)
        time.sleep(_CAUGHT_UP_S)

    def prepared(self) -> None:
        """Wait until the server runs on what it converts behind its first requests; for ControlNets, which may be in
        a process of their own, a while."""
        if not self._prepares:
            return
        self._prepares = False
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < _PREPARED_S:
            parts = prepared_parts(self._client.get(f"{self._url}/metrics").text)
            if parts is None:
                return
            if parts >= {"unet", "vae"} and (parts >= self._controlnets or waited_s > _CONTROLNETS_S):
                return
            time.sleep(0.5)
        print(f"plait has converted only {sorted(parts or ())} in {_PREPARED_S:.0f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop the server and wait for its end."""
        self._opened.close()

    def _ask(self, body: bytes) -> bytes:
        """Send a request; return the response."""
        try:
            answer = self._client.post(f"{self._url}/v1/images/generations", content=body, headers=_HEADERS)
        except httpx2.TransportError as error:
            raise SystemFailed(f"plait did not answer: {error}") from error
        if answer.status_code != httpx2.codes.OK:
            raise SystemFailed(f"plait answered {answer.status_code}: {answer.text[:300]}")
        return answer.content


def prepared_parts(metrics: str) -> frozenset[str] | None:
    """Return which parts of a model run on what was converted, by the server's metrics; None if it converts nothing."""
    if "# TYPE plait_engine_prepared " not in metrics:
        return None
    return frozenset(re.findall(r'^plait_engine_prepared\{.*?part="([^"]+)".*?\} 1', metrics, re.MULTILINE))


def _pixels(answer: bytes) -> ImageArray:
    (image,) = json.loads(answer)["data"]
    with Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) as opened:
        return np.asarray(opened.convert("RGB"))


class InProcessEngine(FleetWorker):
    """Our engine with its default knobs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from plait_serving.diffusion.assemble import EngineSettings, build_engine
        from plait_serving.diffusion.lora.source import FolderSource

        models: ModelFolder = settings["models"]
        self.engine = build_engine(
            EngineSettings(
                model=models.base,
                dtype=settings["dtype"],
                device=settings["device"],
                lora_source=FolderSource(models.root / "loras"),
                controlnets=models.controlnets,
            )
        )
        self._numbers = count()

    def run(self, items: Sequence[ImageSpec], *, one_by_one: bool, keep: bool) -> list[ImageArray]:
        """Ask for the images all at once, or one after the other."""
        with ThreadPoolExecutor(1 if one_by_one else len(items)) as pool:
            made = list(pool.map(self.image, items))
        return made if keep else []

    def image(self, order: ImageSpec) -> ImageArray:
        """Ask for an image as the server would. Raises the engine's errors."""
        request = image_request(order, request_id=f"bench-{next(self._numbers)}")
        return self.engine.generate(request, timeout_s=_ANSWER_S).images[0]

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop(drain_s=0.0)


def image_request(order: ImageSpec, *, request_id: str) -> ImageRequest:
    """Return the request that the server would make of the order."""
    from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraRef, Scheduler

    controls: tuple[ControlRef, ...] = ()
    if order.control is not None:
        name, drawing = order.control
        controls = (ControlRef(name=name, image=control_map(drawing, order.edge)),)
    return ImageRequest(
        request_id=request_id,
        prompt=order.prompt,
        width=order.edge,
        height=order.edge,
        steps=order.steps,
        guidance_scale=order.guidance,
        seed=order.seed,
        scheduler=Scheduler(order.scheduler),
        loras=tuple(LoraRef(name=name, scale=scale) for name, scale in order.loras),
        controlnets=controls,
    )
