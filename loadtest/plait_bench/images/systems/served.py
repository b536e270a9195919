"""`plait serve` as a user starts it, asked over HTTP."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from PIL import Image

from plait_bench.errors import SystemFailed, SystemUnavailable
from plait_bench.fleet.values import Item, ItemOutcome
from plait_bench.host import cores
from plait_bench.images.drawings import control_map
from plait_bench.images.models import ModelFolder
from plait_bench.images.pixels import encode
from plait_bench.images.sizes import DTypeName
from plait_bench.images.workloads import ImageSpec

__all__ = ["Served", "body_of", "configuration", "prepared_parts"]

_HEADERS = {"content-type": "application/json"}
_ANSWER_S = 1800.0
_READY_S = 1200
_STOP_S = 45.0
_PREPARED_S = 600.0
_CONTROLNETS_S = 60.0
_SETTLED_S = 60.0
_CAUGHT_UP_S = 2.0


def configuration(
    models: ModelFolder, *, dtype: DTypeName, knobs: Mapping[str, Any], executor: str = "", is_split: bool = False
) -> dict[str, Any]:
    """Return the plait.yaml: what is served, in which dtype, and nothing else unless a system's name says so.

    `is_split`: the engine leaves one core to each ControlNet's process.
    """
    from plait_serving.images.config import ImagesSection

    images: dict[str, Any] = {
        "model": str(models.base.resolve()),
        "dtype": dtype,
        "controlnets": {name: {"folder": str(path.resolve())} for name, path in models.controlnets.items()},
        "knobs": dict(knobs),
    }
    if models.loras:
        images["loras"] = {"folder": str(models.lora_folder.resolve())}
    if is_split:
        images["knobs"]["threads"] = max(1, cores() - len(models.controlnets))
    if executor:
        if "executor" not in ImagesSection.model_fields:
            raise SystemUnavailable("this plait has no setting images.executor")
        images["executor"] = executor
    server = {"port": 0, "ready_timeout_s": _READY_S}
    return {"server": server, "images": images, "recommend": None}


def body_of(order: ImageSpec, edge: int) -> dict[str, Any]:
    """Return the body of the request that makes an order's image, `edge` pixels wide and high."""
    body: dict[str, Any] = {
        "prompt": order.prompt,
        "size": f"{edge}x{edge}",
        "seed": order.seed,
        "num_inference_steps": order.steps,
        "guidance_scale": order.guidance,
        "scheduler": order.scheduler,
        "loras": [{"name": name, "scale": scale} for name, scale in order.loras],
    }
    if order.control is not None:
        name, drawing = order.control
        file = io.BytesIO()
        Image.fromarray(control_map(name, drawing, edge, edge)).save(file, format="PNG")
        body["controlnets"] = [{"name": name, "image": base64.b64encode(file.getvalue()).decode()}]
    return body


class Served:
    """A `FleetWorker` over a server in processes of its own. It divides the host itself: there is one layout."""

    def __init__(
        self,
        models: ModelFolder,
        *,
        dtype: DTypeName,
        cache: str,
        knobs: Mapping[str, Any],
        executor: str,
        is_split: bool,
    ) -> None:
        """Start the server and wait until it is ready. `cache`: its cache folder, the user's own if empty.

        Raises `SystemUnavailable` or `SystemFailed`.
        """
        config = configuration(models, dtype=dtype, knobs=knobs, executor=executor, is_split=is_split)
        self._edge = _own_edge(models.base)
        self._prepares = executor != "torch" and knobs.get("exact") != "always"
        self._controlnets = frozenset(models.controlnets)
        self._scratch = tempfile.TemporaryDirectory(prefix="plait-bench-")
        file = Path(self._scratch.name) / "plait.json"  # JSON is YAML
        file.write_text(json.dumps(config), encoding="utf-8")
        environ = {**os.environ, "PLAIT_STATE_DIR": str(Path(self._scratch.name) / "state")}
        if cache:
            environ |= {"XDG_CACHE_HOME": cache}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plait.cli.main", "serve", str(file)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._client = httpx2.Client(timeout=_ANSWER_S)
        self._url = self._process.stdout.readline().strip()
        if not self._url:
            self.close()
            raise SystemFailed("plait serve did not start: its message is above")

    def configure(self, *, threads: int, variant: str) -> None:
        """Do nothing: the server uses the host as it sees fit."""

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[ItemOutcome]:
        """Send the requests all at once, or one after the other."""
        orders = [ImageSpec.from_json(item) for item in items]
        bodies = [json.dumps(body_of(order, order.edge or self._edge)).encode() for order in orders]
        if one_by_one:
            answers = [self._ask(body) for body in bodies]
        else:
            with ThreadPoolExecutor(len(bodies)) as pool:
                answers = list(pool.map(self._ask, bodies))
        outcomes = [
            ItemOutcome(finished_s=finished_s, result=_pixels(answer) if keep else None)
            for finished_s, answer in answers
        ]
        if self._prepares:  # what the first images were made on is not what later ones are made on
            self._prepares = False
            self._wait_until_prepared()
        return outcomes

    def settle(self) -> None:
        """Wait until the server is healthy again, and its processes have caught up with the time that they missed."""
        until_s = time.monotonic() + _SETTLED_S
        while not self._is_healthy():
            if time.monotonic() > until_s:
                raise SystemFailed("plait was stopped and continued, and is not healthy")
            time.sleep(0.5)
        time.sleep(_CAUGHT_UP_S)

    def _is_healthy(self) -> bool:
        try:
            answer = self._client.get(f"{self._url}/health", timeout=_SETTLED_S)
        except httpx2.TransportError:
            return False
        return bool(answer.status_code == httpx2.codes.OK)

    def _wait_until_prepared(self) -> None:
        """Wait until the server runs on what it converts behind its first requests; for ControlNets, which may be in
        a process of their own, a while."""
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
        self._client.close()
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
        self._process.wait()
        self._scratch.cleanup()

    def _ask(self, body: bytes) -> tuple[float, bytes]:
        """Send a request; return the time at which its response was complete, and the response."""
        try:
            answer = self._client.post(f"{self._url}/v1/images/generations", content=body, headers=_HEADERS)
        except httpx2.TransportError as error:
            raise SystemFailed(f"plait did not answer: {error}") from error
        finished_s = time.monotonic()
        if answer.status_code != httpx2.codes.OK:
            raise SystemFailed(f"plait answered {answer.status_code}: {answer.text[:300]}")
        return finished_s, answer.content


def prepared_parts(metrics: str) -> frozenset[str] | None:
    """Return which parts of a model run on what was converted, by the server's metrics; None if it converts nothing."""
    if "# TYPE plait_engine_prepared " not in metrics:
        return None
    return frozenset(re.findall(r'^plait_engine_prepared\{.*?part="([^"]+)".*?\} 1', metrics, re.MULTILINE))


def _pixels(answer: bytes) -> dict[str, Any]:
    (image,) = json.loads(answer)["data"]
    with Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) as opened:
        pixels: dict[str, Any] = encode(np.asarray(opened.convert("RGB")))
    return pixels


def _own_edge(base: Path) -> int:
    """Return the edge of the images that a model was made for."""
    sample = json.loads((base / "unet" / "config.json").read_text(encoding="utf-8"))["sample_size"]
    vae = json.loads((base / "vae" / "config.json").read_text(encoding="utf-8"))
    doublings = len(vae["block_out_channels"]) - 1
    return int(sample) << doublings
