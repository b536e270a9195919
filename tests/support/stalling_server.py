"""A server of which every answer is known: none takes time, but request number K stops it for S seconds.

``python -m support.stalling_server K S`` prints its port; when its standard input ends it prints how long the stall
really was.
"""

from __future__ import annotations

import asyncio
import sys
import time

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Stalling(asyncio.Protocol):
    """Requests without bodies."""

    served = 0
    stalled_s = 0.0

    def connection_made(self, transport):
        """Part of asyncio.Protocol."""
        self.transport = transport

    def data_received(self, data):
        """Part of asyncio.Protocol."""
        for _ in range(data.count(b"\r\n\r\n")):
            Stalling.served += 1
            if Stalling.served == int(sys.argv[1]):
                began_s = time.monotonic()
                time.sleep(float(sys.argv[2]))
                Stalling.stalled_s = time.monotonic() - began_s
            self.transport.write(OK)


async def serve():
    """See the module docstring."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stalling, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    print(Stalling.stalled_s, flush=True)


if __name__ == "__main__":
    asyncio.run(serve())
