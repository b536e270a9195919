"""A peer in a process of its own, for tests and measurements.

`python -m plait_disagg.fabric.testing_peer MODE ADDRESS`; the secret comes on stdin in hex, one
line. It leaves when the channel ends, or when stdin does.

Modes: `echo` sends every message back; `hold` connects, says `{"ready": true}` and never receives;
`flood` sends messages of 1 MiB until it is killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from plait_disagg.fabric.endpoints import connect
from plait_disagg.fabric.errors import PeerLost
from plait_disagg.fabric.protocols import Channel

__all__ = ["echo", "main", "spawned_peer"]

_FLOOD_BYTES = 1 << 20


def echo(channel: Channel) -> None:
    """Send every message back until the peer leaves."""
    while True:
        try:
            with channel.recv() as message:
                channel.send(message.header, message.buffers)
        except PeerLost:
            return


def _flood(channel: Channel) -> None:
    payload = bytes(_FLOOD_BYTES)
    for number in count():
        channel.send({"number": number}, [payload])


def main(arguments: list[str]) -> int:
    """Run the peer; see the module's docstring."""
    mode, address = arguments
    secret = bytes.fromhex(sys.stdin.readline().strip())
    with connect(address, secret=secret) as channel:
        if mode == "echo":
            echo(channel)
        elif mode == "flood":
            _flood(channel)
        else:
            channel.send({"ready": True})
            sys.stdin.read()
    return 0


@contextmanager
def spawned_peer(mode: str, address: str, secret: bytes) -> Iterator[subprocess.Popen[str]]:
    """Start the peer and kill it (-9) at the end of the block, if it still runs then."""
    source = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {source!r}); from {__name__} import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, mode, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        if process.stdin is None:
            raise RuntimeError("the peer has no stdin")
        process.stdin.write(secret.hex() + "\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
