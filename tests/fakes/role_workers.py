"""All workers of a role in this process, as whoever publishes an update sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait_disagg.workers.refresher import Refresher


class RoleWorkersInProcess:
    """A `Fleet` in this process. An index in ``dead`` does not answer. `after_stage`: what happens then."""

    def __init__(self, refreshers: Sequence[Refresher]) -> None:
        self.refreshers = list(refreshers)
        self.dead: set[int] = set()
        self.after_stage: Callable[[], object] = lambda: None

    def stage(self, folder: Path) -> Mapping[str, Exception | None]:
        """See `Fleet`."""
        outcomes = self._all(lambda refresher: refresher.stage(folder))
        self.after_stage()
        return outcomes

    def switch(self, version: str) -> Mapping[str, Exception | None]:
        """See `Fleet`."""
        return self._all(lambda refresher: refresher.switch(version))

    def _all(self, step: Callable[[Refresher], None]) -> Mapping[str, Exception | None]:
        return {
            str(number): ConnectionError("no answer") if number in self.dead else _outcome(lambda r=refresher: step(r))
            for number, refresher in enumerate(self.refreshers)
        }


def _outcome(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None
