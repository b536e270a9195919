"""A second copy of an application, for trials: the same models under another name and port.

It runs on its own Ray; or, if the configuration names one, as another application there, below its own path. If we are
killed, that Ray is found and ended like that of a dead `plait serve`, and the application is deleted by the next clone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from plait.config import PlaitConfig
from plait.deployments import Effect
from plait.errors import ServeError
from plait.server import processes
from plait.server.cluster import Cluster
from plait.server.leftovers import clean_up_others, remove_ray_folder
from plait.server.ports import free_port, hold_port
from plait.server.state import PortState, RunRecord, scratch_root
from plait.tuning.measure.application import Compose, RunningApplication
from plait_serving.deployments.process import LOG_PATH_VARIABLE

_APP = "plait-trial"
_HOST = "127.0.0.1"


class Clone(RunningApplication):
    """A clone of an application, started with its first configuration. One per process, because Ray allows only one."""

    def __init__(self, compose: Compose, *, root: Path, log_path: Path, say: Callable[[str], None]) -> None:
        """Create the clone; `root` is plait's state folder on this machine. Ends what killed runs have left there."""
        self._root, self._log_path, self._say = root, log_path, say
        self._run_id = secrets.token_hex(8)
        super().__init__(None, compose, app=_APP, salt=self._run_id)
        self._num_cpus, self._port = 1, 0
        self._direct: socket.socket | None = None
        self._state: PortState | None = None
        self._ray_folder: Path | None = None
        clean_up_others(root)

    def start(self, config: PlaitConfig, *, num_cpus: int) -> None:
        """Start Ray; the application comes with the first `apply`. `num_cpus`: logical CPUs, enough for all later
        configurations. Raises `ServeError`."""
        self._num_cpus = num_cpus
        if config.server.direct_port is not None and config.ray.is_local and self._direct is None:
            self._direct = hold_port(_HOST, 0)
        os.environ[processes.RUN_ID_VARIABLE] = self._run_id
        os.environ[LOG_PATH_VARIABLE] = str(self._log_path)
        self.config = None
        if config.ray.is_local:
            self._cluster, self._of_run = self._start_ray(config), self._run_id
        else:
            self._cluster = Cluster.attach(config, port=free_port(_HOST))
            self.app = self._cluster.own_name(_APP)
            self.prefix = f"/{self.app}"

    def apply(self, config: PlaitConfig, *, limit_s: float) -> dict[str, Effect]:
        """Apply a configuration as `RunningApplication.apply` does, first removing what an earlier one broke, if
        necessary all of Ray.

        Raises `ServeError` if a Ray that is not ours is lost.
        """
        if (lost := self.cluster.lost()) is not None:
            if self._state is None:
                raise ServeError(lost)
            self._say(f"{lost}; starting Ray again")
            self._stop_ray()
            self.start(config, num_cpus=self._num_cpus)
        elif self.config is None:
            self.cluster.delete()
        direct_port = None if self._direct is None else self._direct.getsockname()[1]
        alone = {"direct_port": direct_port, "start_new_first": False}  # no trial waits for room that users need
        server = config.server.model_copy(update=alone)
        try:
            return super().apply(config.model_copy(update={"server": server}), limit_s=limit_s)
        finally:
            self._note_processes()

    def keep(self, config: PlaitConfig) -> None:
        """Do nothing: nobody uses it."""

    def restore(self) -> None:
        """Trust nothing that runs: the next trial has it made anew."""
        self.config = None

    def close(self) -> None:
        """Remove everything that `start` created. Idempotent."""
        left = self._stop_ray()
        if self._direct is not None:
            self._direct.close()
        state, self._state = self._state, None
        if state is not None:
            if not left:
                shutil.rmtree(state.folder, ignore_errors=True)  # every clone has a port of its own
            state.release()

    def _stop_ray(self) -> int:
        """Stop Ray and return how many of its processes survived: normally none."""
        cluster, self._cluster = self._cluster, None
        known = self._note_processes()
        if cluster is not None:
            cluster.stop(hurry=False)
        if self._ray_folder is None:
            return 0
        left = processes.end(known | processes.members(self._run_id, os.getpid()))
        remove_ray_folder(self._ray_folder, logs_to=None)
        return len(left)

    def _start_ray(self, config: PlaitConfig) -> Cluster:
        if self._state is None:
            self._port = free_port(_HOST)
            self._state = PortState.claim(self._root, self._port)
        self._ray_folder = scratch_root() / f"r-{secrets.token_hex(4)}"
        url = f"http://{_HOST}:{self._port}"
        self._state.write(RunRecord(run_id=self._run_id, url=url, ray_folder=str(self._ray_folder)))
        token, folder = self._state.token_path(), self._ray_folder
        cluster = Cluster.start_local(config, port=self._port, num_cpus=self._num_cpus, folder=folder, token_path=token)
        self._note_processes()
        return cluster

    def _note_processes(self) -> frozenset[processes.ProcessId]:
        if self._state is None:
            return frozenset()
        found = processes.members(self._run_id, os.getpid())
        self._state.note(processes=tuple(sorted(found)))
        return found
