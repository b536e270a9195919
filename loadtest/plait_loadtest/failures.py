"""Why requests failed, in words: collected while they end, kept once for all requests that failed alike. And the
limits of the generator and of its machine: which one an error means, and what to do about it.

A text is ours up to the first `: `, and what the server said after it. What the server says of one request only (an
id, a time: words with digits) makes no other text, so that a run has few of them.
"""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from plait_loadtest.scenario import GeneratorLimits, Scenario
from plait_loadtest.values import Records, RequestOutcome

if TYPE_CHECKING:
    from plait_loadtest.wire.http1 import HttpConnection

DESCRIPTORS, PORTS, MEMORY = "out of file descriptors", "out of local ports", "out of memory"
ROOM = "limits.connections or limits.in_flight was met"

_OF_ERROR = {
    errno.EMFILE: DESCRIPTORS, errno.ENFILE: DESCRIPTORS, errno.EADDRNOTAVAIL: PORTS,
    errno.ENOMEM: MEMORY, errno.ENOBUFS: MEMORY,
}  # fmt: skip

_SHOWN_BYTES = 200
_READ_BYTES = 8192  # a key must be found as a whole
_MAX_TEXTS = 1000
_OF_ONE_REQUEST = re.compile(r"[\w+/=-]*\d[\w+/=-]*")
_SHORTEST_SECRET = 6  # letters; a shorter header value is no key, and may be part of any word


class FailureTexts:
    """The texts of a run: `texts[0]` is empty, of requests whose reason nobody knows."""

    def __init__(self) -> None:
        self.texts = [""]
        self._numbers = {"": 0}

    def number(self, text: str) -> int:
        """Return the index of a text, or of one that is alike; beyond 1000 they are one."""
        ours, _, theirs = text.partition(": ")
        key = f"{ours}: {_OF_ONE_REQUEST.sub('#', theirs)}" if theirs else text
        if key not in self._numbers and len(self.texts) >= _MAX_TEXTS:
            text = key = "one of many reasons"
        if key not in self._numbers:
            self._numbers[key] = len(self.texts)
            self.texts.append(text)
        return self._numbers[key]


class FailureLog(FailureTexts):
    """The texts of one process. No header value of the scenario is in them, whatever the server repeats."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._timeout_s = scenario.target.timeout_s
        headers = [scenario.target.headers, *(item.headers for item in scenario.mix)]
        values = {text for each in headers for value in each.values() for text in (value, value.rpartition(" ")[2])}
        self._secrets = sorted((text for text in values if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)
        # A server that sheds load says the same thousands of times a second.
        self._answer = lru_cache(maxsize=512)(self._number_of_answer)

    def of_connection(self, outcome: RequestOutcome, connection: HttpConnection) -> int:
        """Return the index of the text for a request that failed on a connection."""
        head = connection.head
        match outcome:
            case RequestOutcome.HTTP_4XX | RequestOutcome.HTTP_5XX | RequestOutcome.HTTP_OTHER:
                said = f"to {head.location}".encode() if head.location else connection.body
                return self.of_answer(str(head.status), said)
            case RequestOutcome.GARBLED:
                return self.of_answer(connection.why, connection.body if head.status == 0 else b"")
            case RequestOutcome.TIMEOUT:
                begun = "" if connection.first_byte_ns < 0 else ", the answer had begun"
                return self.number(f"target.timeout_s ({self._timeout_s:g} s) was over{begun}")
            case RequestOutcome.CANCELLED | RequestOutcome.INTERRUPTED:
                return 0
        return self.number(connection.why)

    def of_answer(self, why: str, said: bytes) -> int:
        """Return the index of the text for an answer that is no success, and its first bytes."""
        return self._answer(why, said[:_READ_BYTES])

    def _number_of_answer(self, why: str, said: bytes) -> int:
        shown = " ".join(said.decode(errors="replace").split())
        for secret in self._secrets:
            shown = shown.replace(secret, "(not shown)")
        shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown)
        shown = shown.encode()[:_SHOWN_BYTES].decode(errors="ignore")
        return self.number(f"{why}: {shown}" if shown else why)


def joined(parts: Sequence[tuple[Records, Sequence[str]]]) -> tuple[Records, tuple[str, ...]]:
    """Return the records of several processes or hosts in order of index, and the texts that their `why` counts."""
    whole = FailureTexts()
    numbers = [np.array([whole.number(text) for text in texts], dtype=np.uint16) for _, texts in parts]
    records = np.concatenate([each for each, _ in parts])
    records["why"] = np.concatenate([to[each["why"]] for to, (each, _) in zip(numbers, parts, strict=True)])
    return records[np.argsort(records["index"], kind="stable")], tuple(whole.texts)


def limit_of(error: OSError) -> str:
    """Return the limit that an error means; empty: none of this machine's."""
    return _OF_ERROR.get(error.errno or 0, "")


def sentences(met: Mapping[str, int], limits: GeneratorLimits) -> tuple[str, ...]:
    """Return a sentence for each limit that was met: how many requests it held up, and what to do."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hosts = "or share the load among hosts (--part)"
    texts = {
        DESCRIPTORS: f"{{}} requests were not sent; raise ulimit -n, which is {files}, {hosts}",
        PORTS: f"{{}} requests were not sent; widen sysctl net.ipv4.ip_local_port_range, {hosts}",
        MEMORY: f"{{}} requests were not sent; lower the rate, limits.connections or limits.response_bytes, {hosts}",
        ROOM: f"{{}} requests had to wait; raise them, {limits.connections} and {limits.in_flight}, in the scenario",
    }
    return tuple(f"{limit}: {texts[limit].format(count)}" for limit, count in met.items() if count)
