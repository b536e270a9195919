"""A server of which every answer is known: none takes time, but request number K stops it for S seconds.

``python -m fakes.stalling_server K S`` prints its port; when its standard input ends it prints how long the stall
really was. Connections are taken one at a time between answers: an event loop would first take all that came during
the stall, and nobody could know the answers' times.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def serve(stall_at: int, stall_s: float) -> float:
    """Until standard input ends; the seconds that the stall took."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    served, stalled_s = 0, 0.0
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    return stalled_s
                if key.fileobj is listener:
                    ready.register(listener.accept()[0], selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if not connection.recv(65536):
                    ready.unregister(connection)
                    connection.close()
                    continue
                served += 1
                if served == stall_at:
                    began_s = time.monotonic()
                    time.sleep(stall_s)
                    stalled_s = time.monotonic() - began_s
                connection.sendall(OK)


if __name__ == "__main__":
    print(serve(int(sys.argv[1]), float(sys.argv[2])), flush=True)
