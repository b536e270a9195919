"""A running application whose configuration can be changed: what a clone and a live service have in common.

A change sends the whole application to Serve again; replicas whose version stays the same only receive their new
knobs (`plait.deployments.effects`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from plait.config import PlaitConfig
from plait.deployments import Deployment, Effect, deployments, effects
from plait.doctor.machine import available_memory_bytes
from plait.errors import PlaitError, told
from plait.gpu_shares import with_gpus
from plait.server.cluster import Cluster, no_room_for
from plait.server.ports import health, with_port
from plait.targets import load_target
from plait.tuning.measure.cost import ReservedResources, reserved
from plait.tuning.measure.usage import pss_bytes, replica_pids
from plait_autoconfig.jobs.runner import PARTING_S

Compose = Callable[[PlaitConfig], Sequence[Deployment]]
"""Returns what is deployed for a configuration."""

HAND_OVER_S = 2.0 * PARTING_S
"""For how long one waits for the measuring process of a tuner that was killed: it gives back what it changed."""

_log = logging.getLogger(__name__)


def compose_of(target: str = "") -> Compose:
    """Return what makes the table: `module:function`, or plait's own if empty. Raises `PlaitError`."""
    return cast("Compose", load_target(target)) if target else deployments


class RefusedStart(PlaitError):
    """Serve reports that the application cannot come up with this configuration."""


class NotReady(PlaitError):
    """The application did not come up in time."""


class LiveBusy(PlaitError):
    """Another process is tuning this service."""


def alone_with(what: str, path: Path, *, wait_s: float) -> TextIO:
    """Return a file whose lock says that this process tunes a service that others use; it is held until the file is
    closed, or the process ends. Raises `LiveBusy` if another process still holds it after `wait_s`."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    file, until_s = path.open("a+"), time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                file.close()
                raise LiveBusy(f"process {path.read_text()} tunes {what} already") from None
            time.sleep(0.1)
        else:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """How a configuration came into force. `restarted`: names of what had to. `done`: a sentence, empty if nothing
    changed. `notes`: what a table of trials should say besides."""

    restarted: tuple[str, ...] = ()
    done: str = ""
    notes: tuple[str, ...] = ()


class RunningApplication:
    """An application on a cluster. `config` is what runs; None if nothing does, or after a failed change. `url` takes
    requests."""

    def __init__(
        self,
        cluster: Cluster | None,
        compose: Compose,
        *,
        app: str,
        salt: str,
        prefix: str = "",
        run_id: str | None = None,
        config: PlaitConfig | None = None,
    ) -> None:
        """`run_id`: only processes of this run are its own, if given."""
        self._cluster, self.app, self.prefix, self.config = cluster, app, prefix, config
        self._compose, self._salt, self._of_run = compose, salt, run_id

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        assert self._cluster is not None, "no Ray runs"
        return self._cluster

    @property
    def url(self) -> str:
        """Scheme, host and port; those of the ingress itself if it listens directly, because users then go there."""
        direct_port = None if self.config is None or self.prefix else self.config.server.direct_port
        return self.cluster.url if direct_port is None else with_port(self.cluster.url, direct_port)

    @property
    def reserved(self) -> ReservedResources:
        """What Ray reserves for it."""
        assert self.config is not None, "nothing runs"
        return reserved(self.config)

    @property
    def may_end(self) -> frozenset[str]:
        """Deployments that end processes of their own: those that scale."""
        rows = () if self.config is None else deployments(self.config)
        return frozenset(row.name for row in rows if row.min_replicas < row.max_replicas)

    def apply(self, config: PlaitConfig, *, limit_s: float) -> dict[str, Effect]:
        """Change the application and wait until all of it runs; return what happened to each deployment, a restart that
        was not meant included.

        Raises `RefusedStart` or `NotReady`; the application is then in an unknown state, and `config` is None.
        """
        before, self.config = self.config, None
        with told(PlaitError, to=RefusedStart):
            config = with_gpus(config, self.cluster.nodes())
        after = self._rows(config)
        found = effects(() if before is None else self._rows(before), after)
        if found:
            there, prefix = self.pids(), self.prefix or "/"
            in_place = self._is_short_of_memory(there, after, found)
            self.cluster.deploy(after, name=self.app, salt=self._salt, route_prefix=prefix, in_place=in_place)
            self._wait(limit_s)
            found |= dict.fromkeys(_restarted(there, self.pids(), found), Effect.RESTARTED)
        self.config = config
        return found

    def _rows(self, config: PlaitConfig) -> Sequence[Deployment]:
        """Return what is deployed for a configuration as `plait serve` hands it to this Serve."""
        return self._compose(config.model_copy(update={"server": config.server.behind(self.cluster.host)}))

    def _is_short_of_memory(
        self, there: Mapping[int, str], after: Sequence[Deployment], found: Mapping[str, Effect]
    ) -> bool:
        """Return whether the new replicas that are to start before old ones stop, one of each deployment, do not fit
        into this machine's memory beside these."""
        surging = {row.name for row in after if row.starts_first}
        restarted = {name: pid for pid, name in there.items() if found.get(name) is Effect.RESTARTED}
        beside = {name: pid for name, pid in restarted.items() if name in surging}
        if not beside or sum(map(pss_bytes, beside.values())) <= available_memory_bytes():
            return False
        _log.warning(no_room_for(sorted(beside)))
        return True

    def pids(self) -> dict[int, str]:
        """Return the replicas that run on this machine: pid to deployment."""
        return replica_pids(self.app, run_id=self._of_run)

    def _wait(self, limit_s: float) -> None:
        waiting_for: tuple[str, ...] = ()
        for state in self.cluster.states(limit_s):
            if state.failure is not None:
                raise RefusedStart(state.failure)
            if state.running and health(self.url + self.prefix) is None:
                return
            waiting_for = state.waiting_for
        missing = ", ".join(waiting_for) or health(self.url + self.prefix)
        raise NotReady(f"not ready after {limit_s:.0f} s: {missing}")


def _restarted(before: Mapping[int, str], after: Mapping[int, str], found: Mapping[str, Effect]) -> set[str]:
    """Return the deployments none of whose processes is left, though at most their knobs were to change."""
    kept = {name for pid, name in before.items() if after.get(pid) == name}
    meant = {name for name, effect in found.items() if effect is not Effect.RECONFIGURED}
    return set(before.values()) - kept - meant
