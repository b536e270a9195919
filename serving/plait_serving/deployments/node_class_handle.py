"""One handle for the deployments of a model, of which there is one for each class of nodes (`plait_deploy.on_ray`).

Most of them may have no replica. Serve would keep a request to such a one until it has, and give it one, wherever the
plan wants it; so requests go only where replicas were seen, and broadcasts go to all.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from plait_serving.deployments.metrics import ask_each

_LOOK_S = 1.0
_ANSWER_S = 1.0


class PlacedHandle:
    """Behaves like Serve's handle, as far as plait uses one: `broadcast`, `options`, and methods with `remote`."""

    def __init__(self, handles: Mapping[str, Any], *, seen: _LastSeen | None = None) -> None:
        """Take the handles by class of nodes; when the application is built, deployments, which Serve replaces."""
        self._handles = dict(handles)
        self._seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        """Serve pickles the arguments of a running replica to see which deployments it calls."""
        return PlacedHandle, (self._handles,)

    def options(self, **options: Any) -> PlacedHandle:
        """Return a handle with these options."""
        return PlacedHandle({of: handle.options(**options) for of, handle in self._handles.items()}, seen=self._known())

    def broadcast(self, method: str, *arguments: Any) -> SimpleNamespace:
        """Call the method on every replica of every deployment; those without replicas have no answers."""

        def results(*, timeout_s: float | None = None, return_exceptions: bool = False) -> list[Any]:
            found = ask_each(self._handles, method, *arguments, timeout_s=timeout_s)
            answers = [answer for each in found.values() for answer in each]
            for error in answers if not return_exceptions else ():
                if isinstance(error, BaseException):
                    raise error
            return answers

        return SimpleNamespace(results=results)

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(
            remote=lambda *given: getattr(self._handles[self._known().choose()], method).remote(*given)
        )

    def _known(self) -> _LastSeen:
        if self._seen is None:
            self._seen = _LastSeen(self._handles)
        return self._seen


class _LastSeen:
    """How many replicas each deployment had lately; whoever asks never waits, a thread looks."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = dict(handles)
        self._replicas: dict[str, int] = {}
        self._thread = threading.Thread(target=self._look, name="plait-placed", daemon=True)
        self._thread.start()

    def choose(self) -> str:
        """Return a class, each as likely as it has replicas; any if none was seen yet."""
        there = {of: count for of, count in self._replicas.items() if count}
        if not there:
            return next(iter(self._handles))
        return random.choices(list(there), list(there.values()))[0]

    def _look(self) -> None:
        while True:
            try:
                found = ask_each(self._handles, "whereabouts", timeout_s=_ANSWER_S)
            except RuntimeError:  # the interpreter ends, and starts no threads any more
                return
            self._replicas = {of: len(answers) for of, answers in found.items()}
            time.sleep(_LOOK_S)
