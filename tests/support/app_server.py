"""An application behind a real uvicorn, in a thread of the test's process."""

from __future__ import annotations

import threading

import uvicorn
from starlette.types import ASGIApp

from support.waiting import wait_for


class AppServer:
    """uvicorn in a thread on a free port of 127.0.0.1."""

    def __init__(self, app: ASGIApp) -> None:
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._uvicorn.started)
        self.port: int = self._uvicorn.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Waits until its thread has ended."""
        self._uvicorn.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
