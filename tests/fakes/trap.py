"""What nobody may set off: an address that requests forged for a server would reach, and a pickle that runs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any


class Payload:
    """What a pickle or a module could do: leave a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


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
