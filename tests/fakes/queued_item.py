"""What a worker's queue holds, without a request."""

from __future__ import annotations

from dataclasses import dataclass

from plait_disagg.errors import RankError


@dataclass(eq=False, kw_only=True)
class QueuedItem:
    """An item that remembers how it ended."""

    rows: int = 1
    alone: bool = False
    gone: bool = False
    came_s: float = 0.0
    due_s: float | None = None
    error: RankError | None = None
    request_ids: tuple[str, ...] = ()

    @property
    def lost_s(self) -> float | None:
        """See Item."""
        return self.due_s

    def fail(self, error: RankError) -> None:
        """See Item."""
        self.error = error
