"""One handle for the deployments of a model, of which there is one for each class of nodes (`plait_deploy.on_ray`).

Most of them may have no replica. Serve would keep a request to such a one until it has, and give it one, wherever the
plan wants it; so requests go only where Serve has told this process of replicas, and broadcasts go to all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from plait_serving.deployments.metrics import ask_all
from plait_serving.deployments.ray_internals import known_replicas


class PlacedHandle:
    """Behaves like Serve's handle, as far as plait uses one: `broadcast`, `options`, and methods with `remote`."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """Take the handles by class of nodes; when the application is built, deployments, which Serve replaces."""
        self._handles = dict(handles)

    def options(self, **options: Any) -> PlacedHandle:
        """Return a handle with these options."""
        return PlacedHandle({of: handle.options(**options) for of, handle in self._handles.items()})

    def broadcast(self, method: str, *arguments: Any) -> SimpleNamespace:
        """Call the method on every replica of every deployment; those without replicas have no answers."""

        def results(*, timeout_s: float | None = None, return_exceptions: bool = False) -> list[Any]:
            with ThreadPoolExecutor(len(self._handles)) as threads:
                found = threads.map(
                    lambda handle: ask_all(handle, method, *arguments, timeout_s=timeout_s), self._handles.values()
                )
                answers = [answer for each in found for answer in each]
            for error in answers if not return_exceptions else ():
                if isinstance(error, BaseException):
                    raise error
            return answers

        return SimpleNamespace(results=results)

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*given: Any) -> Any:
            methods = [getattr(handle, method) for handle in self._handles.values()]  # from then on Serve tells of each
            counts = [len(known_replicas(each)) for each in methods]
            chosen = random.choices(methods, counts)[0] if any(counts) else methods[0]
            return chosen.remote(*given)

        return SimpleNamespace(remote=remote)
