"""A queue in which tenants take turns: one item of each in turn, the items of one tenant in their order."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TurnQueue(Generic[T]):
    """Thread-safe. An item waits for at most one of each other tenant, beside those of its own before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[T]] = {}

    def put(self, tenant: str, item: T) -> None:
        """Add an item of a tenant, by name."""
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> tuple[str, T] | None:
        """Remove the next item and return it with its tenant; None if there is none. Its tenant then goes last."""
        with self._lock:
            tenant = next(iter(self._waiting), None)
            if tenant is None:
                return None
            items = self._waiting.pop(tenant)
            item = items.popleft()
            if items:
                self._waiting[tenant] = items
            return tenant, item
