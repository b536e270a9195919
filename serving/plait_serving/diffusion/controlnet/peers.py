"""One client of a ControlNet service: a thread that receives, a thread that sends, and a bound on what waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from plait_fabric import Channel, ChannelClosed, FabricError, PeerLost, recv_tensors, send_tensors
from plait_serving.diffusion.controlnet.wire import (
    VERSION,
    Call,
    Hello,
    Open,
    Reply,
    Request,
    Step,
    WireError,
    parse_request,
    reply_message,
    welcome_header,
)
from plait_serving.diffusion.protocols import Conditioning

__all__ = ["Peer"]

_log = logging.getLogger(__name__)

_MAX_BACKLOG = 64
"""Messages of one client that wait to be worked on, or whose answer waits to be sent; then its channel pushes back.

A correct client has a handful.
"""


class Peer:
    """A connected client. ``on_request`` and ``on_lost`` are called from its threads; `on_lost` exactly once."""

    def __init__(
        self,
        number: int,
        channel: Channel,
        *,
        controlnet: str,
        send_timeout_s: float,
        on_request: Callable[[Peer, Request], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self.number = number
        self._channel = channel
        self._controlnet = controlnet
        self._send_timeout_s = send_timeout_s
        self._on_request = on_request
        self._on_lost = on_lost
        self._room = threading.Semaphore(_MAX_BACKLOG)
        self._outgoing: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive, name=f"controlnet peer {number} in", daemon=True)
        self._sender = threading.Thread(target=self._send, name=f"controlnet peer {number} out", daemon=True)
        self._receiver.start()
        self._sender.start()

    def done(self) -> None:
        """One request that wants no answer was worked on; the client may send another."""
        self._room.release()

    def answer(self, reply: Reply) -> None:
        """Sends soon, from the peer's own thread: a slow client holds up nobody else."""
        self._outgoing.put(reply)

    def close(self, *, flush_s: float = 0.0) -> None:
        """Hangs up, after what is to be sent was sent or ``flush_s`` passed."""
        self._outgoing.put(None)
        if flush_s > 0:
            self._sender.join(flush_s)
        self._channel.close()
        self._room.release()

    def join(self, timeout_s: float) -> None:
        """Waits for the two threads; call `close` first."""
        for thread in (self._receiver, self._sender):
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _receive(self) -> None:
        try:
            self._greet()
            while True:
                request = self._next_request()
                self._room.acquire()
                self._on_request(self, request)
        except (PeerLost, ChannelClosed) as error:
            _log.info("ControlNet %s: client %s left: %s", self._controlnet, self._channel.peer, error)
        except (FabricError, WireError) as error:
            _log.warning("ControlNet %s: dropping client %s: %s", self._controlnet, self._channel.peer, error)
        finally:
            self._outgoing.put(None)
            self._channel.close()
            self._on_lost(self)

    def _greet(self) -> None:
        request = self._next_request()
        if not isinstance(request, Hello) or request.version != VERSION:
            raise WireError(f"the client must begin with hello, version {VERSION}")
        send_tensors(self._channel, welcome_header(self._controlnet), {}, timeout_s=self._send_timeout_s)

    def _next_request(self) -> Request:
        with recv_tensors(self._channel) as message:
            return _detached(parse_request(message.header, message.tensors))

    def _send(self) -> None:
        while (reply := self._outgoing.get()) is not None:
            header, tensors = reply_message(reply)
            try:
                send_tensors(self._channel, header, tensors, timeout_s=self._send_timeout_s)
            except FabricError as error:
                if not isinstance(error, PeerLost | ChannelClosed):
                    _log.warning("ControlNet %s: client %s: %s", self._controlnet, self._channel.peer, error)
                self._channel.close()
                return
            self._room.release()


def _detached(request: Request) -> Request:
    """The request with tensors of its own: those of a message go back to the channel."""
    if isinstance(request, Open):
        old = request.conditioning
        own = Conditioning(
            text=old.text.clone(),
            added={name: value.clone() for name, value in old.added.items()},
            n=old.n,
            uses_cfg=old.uses_cfg,
        )
        return Open(
            session=request.session,
            image=request.image.copy(),
            conditioning=own,
            width=request.width,
            height=request.height,
        )
    if isinstance(request, Step):
        return Step(seq=request.seq, calls=tuple(_detached_call(call) for call in request.calls))
    return request


def _detached_call(call: Call) -> Call:
    return replace(call, sample=call.sample.clone())
