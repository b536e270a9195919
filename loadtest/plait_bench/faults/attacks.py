"""What a tenant may do to the others. An attack goes on until it is stopped, in a process of its own: what it costs to
send is not to delay who measures.

Attackers have user keys, like everybody. They wait for no advice: who was refused asks again.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle, product, repeat
from urllib.parse import urlsplit

from PIL import Image

from plait_bench.benchmark import said, started
from plait_bench.faults.requests import Ask, Reply, image_ask
from plait_bench.faults.server import Client

KEYS = {"a": "the key of the tenant who asks too much", "b": "the key of the other tenant"}

LORA_SETS = [[f"set{number}-{place}" for place in range(7)] for number in range(3)]
"""The LoRA sets of three attackers, by name: each fills the whole budget."""

_FILES, _LEAVE_S = 8, 5.0
_VOLLEY_S = 15.0
"""Between two volleys of large bodies: they are to harm by what they hold, not by their mere bytes a second."""

_PROMPT_CLIENTS, _LORA_STEPS = 8, 1000
_DRIPS, _DRIPPED_BYTES = 600, 10_000
_BODIES, _BODY_BYTES, _PIECE_BYTES = 12, 59_000_000, 1 << 18
_AGAIN_S = 0.1
_NICE = 10
"""An attacker has a machine of its own; here it leaves the cores to the server if that wants them."""


class Attacker:
    """A client of the tenant A. `turn`: how often there was the attack before; `ended` counts how requests ended."""

    def __init__(self, url: str, client: Client, turn: int) -> None:
        self.client = client
        self.turn = turn
        self.ended: Counter[str] = Counter()
        place = urlsplit(url)
        self._host, self._port = place.hostname or "", place.port or 80

    async def send(self, ask: Ask, *, leave_after_s: float | None = None) -> None:
        """Send a request, and count how it ended."""
        reply = await self.client.send(ask, leave_after_s=leave_after_s)
        self.ended[_named(reply)] += 1
        if reply.status in (None, 429) and not reply.has_left:
            await asyncio.sleep(_AGAIN_S)

    async def clients(self, count: int, asks: Callable[[int], Iterator[Ask]]) -> None:
        """Have clients that ask again as soon as they have an answer; `asks` makes the requests of each."""

        async def one(number: int) -> None:
            for ask in asks(number):
                await self.send(ask)

        await asyncio.gather(*(one(number) for number in range(count)))

    async def volleys(self, sends: Sequence[Callable[[], Awaitable[None]]], *, every_s: float) -> None:
        """Call all at once, and again when all have ended, but not before `every_s`."""
        while True:
            until_s = time.monotonic() + every_s
            await asyncio.gather(*(send() for send in sends))
            await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    async def body(self, length: int, pieces: Iterator[bytes], *, every_s: float = 0.0) -> None:
        """Send a body piece by piece until the server ends it, and count how that ended."""
        end = "closed"
        with suppress(OSError):
            end = await self._posted(length, pieces, every_s)
        self.ended[f"{'drip' if every_s else 'body'} {end}"] += 1
        await asyncio.sleep(_AGAIN_S)

    async def _posted(self, length: int, pieces: Iterator[bytes], every_s: float) -> str:
        """Return the status of the answer, which may come before the body's end; "closed" if there is none."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        answered = asyncio.create_task(reader.readline())
        try:
            writer.write(
                f"POST /v1/images/generations HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
                f"authorization: Bearer {KEYS['a']}\r\ncontent-type: application/json\r\n"
                f"content-length: {length}\r\n\r\n".encode()
            )
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.wait([answered], timeout=every_s)
                if answered.done():
                    break
            return (await answered).decode(errors="replace").partition(" ")[2][:3] or "closed"
        finally:
            answered.cancel()
            answered.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else looks
            writer.close()


def _named(reply: Reply) -> str:
    if reply.is_hung or reply.has_left:
        return "hung" if reply.is_hung else "left"
    return str(reply.status) if reply.failure is None else reply.failure.partition(":")[0]


async def decode(attacker: Attacker) -> None:
    """Images that take half a minute to decode, eight of two kinds at once, whose clients leave after 5 s."""
    files = (repeated_scans(), text_chunks())
    asks = [ask for file in files for ask in [_edit(file)] * _FILES]
    await attacker.volleys([partial(attacker.send, ask, leave_after_s=_LEAVE_S) for ask in asks], every_s=_VOLLEY_S)


def _edit(file: bytes) -> Ask:
    fields = {"prompt": "fish", "size": "64x64", "num_inference_steps": 2, "image": base64.b64encode(file).decode()}
    return Ask(key="edit", form="image", path="/v1/images/edits", body=json.dumps(fields).encode(), needs=frozenset())


async def parse(attacker: Attacker) -> None:
    """Eight clients with prompts that take long to read, four in each request."""
    names = ("prompt", "negative_prompt", "prompt_2", "negative_prompt_2")
    asks = [image_ask("prompt", prompt_syntax="a1111", **dict.fromkeys(names, text)) for text in PROMPTS]
    asks += [image_ask("prompt", **dict.fromkeys(names, text)) for text in PROMPTS]
    await attacker.clients(_PROMPT_CLIENTS, lambda number: cycle([*asks[number:], *asks[:number]]))


async def lora(attacker: Attacker) -> None:
    """Three clients with requests of a thousand steps, each with a LoRA set as large as the cache."""

    def asks(number: int) -> Iterator[Ask]:
        loras = [{"name": name, "scale": 0.5} for name in LORA_SETS[number]]
        return repeat(image_ask("lora", prompt="fish", seed=number, num_inference_steps=_LORA_STEPS, loras=loras))

    await attacker.clients(len(LORA_SETS), asks)


async def sizes(attacker: Attacker) -> None:
    """One client, each of whose images has a size that nobody has asked for before."""
    model = (await attacker.client.get("/v1/models")).json()["data"][0]
    mine = list(distinct_sizes(model["limits"]["size_multiple"]))[attacker.turn % 2 :: 2]
    asks = [image_ask(size, prompt="fish", size=size, num_inference_steps=1) for size in mine]
    await attacker.clients(1, lambda _: cycle(asks))


async def bodies(attacker: Attacker) -> None:
    """Six hundred bodies that come a byte a second, and twelve of 59 MB at once."""
    large = large_body(_BODY_BYTES)

    async def drip() -> None:
        while True:
            await attacker.body(_DRIPPED_BYTES, repeat(b" ", _DRIPPED_BYTES), every_s=1.0)

    def send() -> Awaitable[None]:
        pieces = (large[at : at + _PIECE_BYTES] for at in range(0, len(large), _PIECE_BYTES))
        return attacker.body(len(large), pieces)

    volleys = attacker.volleys([send] * _BODIES, every_s=_VOLLEY_S)
    await asyncio.gather(volleys, *(drip() for _ in range(_DRIPS)))


ATTACKS: Mapping[str, Callable[[Attacker], Awaitable[None]]] = {
    attack.__name__: attack for attack in (decode, parse, lora, sizes, bodies)
}
ALL = "all"


@contextmanager
def attacking(name: str, url: str, *, turn: int = 0) -> Iterator[Counter[str]]:
    """Have an attack, or all, go on meanwhile; how its requests ended is in what is yielded when it is over. Raises
    `SystemFailed` if it ends by itself, or does not end."""
    ended: Counter[str] = Counter()
    with ExitStack() as stack:
        attacks = ATTACKS if name == ALL else (name,)
        running = [stack.enter_context(started(_attack, attack, url, turn)) for attack in attacks]
        for process in running:
            said(process)  # it has begun
        yield ended
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
        for process in running:
            ended.update(json.loads(said(process)))


def _attack(name: str, url: str, turn: int) -> None:
    """Attack until standard input ends, then print how requests ended."""
    os.nice(_NICE)

    async def until_told() -> Counter[str]:
        async with Client(url, key=KEYS["a"]) as client:
            attacker = Attacker(url, client, turn)
            attack = asyncio.ensure_future(ATTACKS[name](attacker))
            # A thread that waits for the pipe would keep this process alive after an attack that failed.
            asyncio.get_running_loop().add_reader(sys.stdin, attack.cancel)
            print("begun", flush=True)
            with suppress(asyncio.CancelledError):
                await attack
            return attacker.ended

    print(json.dumps(asyncio.run(until_told())), flush=True)


# ---- what they send: files that cost far more to read than to send, prompts and sizes --------------------------------

PROMPT_CHARS = 32_000

_BRACKETS = (")", "(a)x", "((a)) ", "(a:1.1)", "[(:)]", "):", "\\:", "<a:<", "<lora:noto:1>", "BREAK ", "[a|b", "(:1")

PROMPTS = tuple((text * PROMPT_CHARS)[:PROMPT_CHARS] for text in _BRACKETS)
"""Prompts of the longest kind whose marks take the most time to read, or did once."""

SCAN, _PNG = b"\xff\xda", b"\x89PNG\r\n\x1a\n"


def repeated_scans(*, edge: int = 4000, repeats: int = 1300) -> bytes:
    """Return a grey progressive JPEG whose last scan comes so many times again: every time, all blocks are gone over,
    for some hundred bytes of the file."""
    buffer = io.BytesIO()
    Image.new("L", (edge, edge), 128).save(buffer, "JPEG", progressive=True)
    plain = buffer.getvalue()
    scan, end = plain.rindex(SCAN), plain.rindex(b"\xff\xd9")
    return plain[:end] + plain[scan:end] * repeats + plain[end:]


def text_chunks(*, count: int = 900_000) -> bytes:
    """Return a PNG of one pixel behind so many empty texts."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    pixel = _chunk(b"IDAT", zlib.compress(b"\0\0"))
    return _PNG + head + _chunk(b"tEXt", b"k\0") * count + pixel + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def distinct_sizes(multiple: int) -> Iterator[str]:
    """Return sizes, each once, the smallest first; 2,116 of 46 edges."""
    pairs = product(range(1, 47), repeat=2)
    for width, height in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair)):
        yield f"{width * multiple}x{height * multiple}"


def large_body(nbytes: int) -> bytes:
    """Return the body of a request for an image that is so long, nearly all of it a control image."""
    start = b'{"prompt": "fish", "controlnets": [{"name": "edges", "image": "'
    end = b'"}]}'
    return start + b"A" * (nbytes - len(start) - len(end)) + end
