"""An address that nobody may call: what requests that are forged for a server would reach."""

from __future__ import annotations

import socket


class Trap:
    """A listener that nobody may call."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.05)
        self.port: int = self._socket.getsockname()[1]

    def was_called(self) -> bool:
        """Whether a connection came."""
        try:
            self._socket.accept()[0].close()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Ends it."""
        self._socket.close()
