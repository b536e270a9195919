"""A listener whose connections a test can see and cut, as the end of its process would."""

from __future__ import annotations

from typing import Self

from plait_fabric import Channel, Listener

__all__ = ["CutListener"]


class CutListener:
    """Passes on what `listener` accepts; `channels` are all that it accepted so far."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.channels: list[Channel] = []

    @property
    def address(self) -> str:
        """The address to connect to."""
        return self._listener.address

    @property
    def rejected(self) -> int:
        """Connections dropped so far."""
        return self._listener.rejected

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Wait for the next peer."""
        channel = self._listener.accept(timeout_s)
        self.channels.append(channel)
        return channel

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def cut(self) -> None:
        """Stop listening and close every channel."""
        self.close()
        for channel in list(self.channels):
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
