"""`plait serve` as a process of its own, for tests, and the session's one server with the starter models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.server import processes
from plait.server.state import RunRecord
from support.asking import Answer, ask
from support.prometheus import found

REPOSITORY = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 600.0  # what `server.ready_timeout_s` is
REAL, FAKE = ("plait.cli.main", "serve"), ("fakes.serve",)


class PlaitServer:
    """A running server. ``url`` is what it printed on stdout."""

    def __init__(self, process: subprocess.Popen[str], port: int, state_folder: Path) -> None:
        self.process = process
        self.port = port
        self.state_folder = state_folder
        self.url = ""

    @classmethod
    def launch(
        cls,
        module: Sequence[str],
        arguments: Sequence[str],
        *,
        port: int,
        root: Path,
        environ: Mapping[str, str] | None = None,
    ) -> PlaitServer:
        """Starts it and returns at once; `wait_ready` waits."""
        root.mkdir(exist_ok=True)
        path = os.pathsep.join([str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "PLAIT_STATE_DIR": str(root / "state"), **(environ or {})}
        errors = (root / "stderr.txt").open("a")
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
            cwd=root,
            start_new_session=True,
        )
        errors.close()
        return cls(process, port, root / "state" / f"port-{port}")

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> PlaitServer:
        """Reads the address that it prints when it is ready; fails with its stderr if it ends before."""
        started_s = time.monotonic()
        watchdog = threading.Timer(timeout_s, self.process.kill)  # then reading its stdout ends, too
        watchdog.daemon = True
        watchdog.start()
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        watchdog.cancel()
        waited_s = time.monotonic() - started_s
        assert self.url, f"not ready after {waited_s:.0f} s:\n{self.errors()}\n{self.log()[-3000:]}"
        return self

    def errors(self) -> str:
        """What it told on stderr, earlier servers of the same folder included."""
        return (self.state_folder.parent.parent / "stderr.txt").read_text()

    def log(self) -> str:
        """Its log file."""
        path = self.state_folder / "serve.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def record(self) -> RunRecord:
        """What it wrote down about itself."""
        return RunRecord.from_json((self.state_folder / "run.json").read_text())

    def members(self) -> frozenset[processes.ProcessId]:
        """Every process that belongs to it, itself excluded."""
        return processes.members(self.record().run_id, self.process.pid)

    def replica_pids(self, deployment: str) -> list[int]:
        """The processes of a deployment's replicas (Ray names them)."""
        wanted = f"ray::ServeReplica:plait:{deployment}"
        found = []
        for process in self.members():
            try:
                line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            except OSError:  # it has ended since
                continue
            title = line.split(b"\0")[0].decode(errors="replace").strip()
            if title == wanted or title.startswith(wanted + "."):
                found.append(process.pid)
        return found

    def signal(self, signum: signal.Signals) -> None:
        """Sends the command a signal."""
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = 180) -> int:
        """Its exit code."""
        code = self.process.wait(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def kill_and_clean(self) -> None:
        """SIGKILL, and what the next start would do; for a test's own clean-up."""
        from plait.server import leftovers
        from plait.server.state import PortState

        self.process.kill()
        self.wait()
        state = PortState.claim(self.state_folder.parent, self.port)
        leftovers.clean_up(state)
        state.release()

    def get(self, path: str, *, timeout_s: float = 120) -> tuple[int, Any, Mapping[str, str]]:
        """GET: status, JSON body, headers."""
        return _json(ask(self.url + path, timeout_s=timeout_s))

    def metric(self, name: str) -> float:
        """The sum of a metric's samples in `/metrics`; 0 if there are none."""
        return sum(found(self.metrics(), name))

    def metrics(self) -> str:
        """What the ingress that answers says of all."""
        return ask(self.url + "/metrics", timeout_s=120).text

    def post(self, path: str, *, timeout_s: float = 120) -> tuple[int, Any, Mapping[str, str]]:
        """POST without a body: status, JSON body, headers."""
        return _json(ask(self.url + path, b"", timeout_s=timeout_s))

    def generate(
        self, timeout_s: float = 120, headers: Mapping[str, str] | None = None, url: str | None = None, **body: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """POST /v1/images/generations: status, JSON body, headers."""
        return _json(ask((url or self.url) + "/v1/images/generations", body, headers=headers, timeout_s=timeout_s))


def _json(answer: Answer) -> tuple[int, Any, Mapping[str, str]]:
    return answer.status, answer.json(), dict(answer.headers.items())


_GIVEN: set[int] = set()


def free_port() -> int:
    """A port that is free now and was not given before: what asked for the last one may not listen yet."""
    from plait.server.ports import free_port as find

    while (port := find("127.0.0.1")) in _GIVEN:
        continue
    _GIVEN.add(port)
    return port


CONFIG = """
server: {drain_s: 30}
recommend: null
images:
  model: ./sd
  name: tiny
  dtype: float32
  executor: torch
  loras: {folder: loras}
  controlnets:
    edges: {folder: cn-edges, preprocessor: edges, threads: 1}
  knobs: {controlnet_placement: remote, largest_batch: 8, threads: 1}
"""


def write_tiny_models(root: Path) -> Path:
    """A tiny base with a ControlNet and three LoRAs, and the plait.yaml that serves them, which is returned."""
    from support.tiny import tiny_controlnet, tiny_lora, tiny_sd

    base = tiny_sd(root / "sd")
    tiny_controlnet(root / "cn-edges", base, seed=1)
    tiny_lora(root / "loras" / "noto.safetensors", base, seed=3)
    tiny_lora(root / "loras" / "sketch.safetensors", base, seed=4, fmt="kohya")
    tiny_lora(root / "loras" / "spoken.safetensors", base, seed=5, with_text_encoder=True)
    path = root / "plait.yaml"
    path.write_text(CONFIG)
    return path
