"""The cost of an RDMA link: a record of parameters and the time of one message between two idle hosts. Pure.

n: payload bytes. T(n): one-way time in seconds, from the call that posts a message to the moment at which the
receiver has seen its completion; what `ib_send_lat` calls latency.

- small, n <= small_bytes, two-sided (SEND): T(n) = o_s + L + f(n) + (n - 1) G + o_r, LogGP (Alexandrov et al., SPAA
  1995) with o_s = post_s + doorbell_s, L = wire_s, G = small_s_per_byte, o_r = completion_s. f(n) = 0 while the payload
  travels inside the work request (n <= inline_bytes), otherwise fetch_s, which the NIC takes to read it from memory.
- large, one-sided (WRITE with immediate): T(n) = alpha_s + n / bytes_per_s (Hockney, Parallel Computing 20, 1994).

A message keeps the sender's port busy for max(gap_s, n / bytes_per_s), and later the receiver's: see
`LinkPort`. Between back-to-back small messages there is only that gap (LogfP: Hoefler et al., IPDPS 2006).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


class BadLink(ValueError):
    """A parameter of a link is missing or invalid; `field` names it."""

    def __init__(self, link: str, field: str, why: str) -> None:
        super().__init__(f"link {link!r}: {field}: {why}")
        self.field = field


def _within(min_value: float, max_value: float) -> Any:
    """Declare a parameter with its permitted values. They are wider than any hardware, so that only mistakes of a unit
    are rejected: a nanosecond or a second where microseconds are usual, 8 Mbit/s to 80 Tbit/s."""
    return field(metadata={"within": (min_value, max_value)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link; see the module docstring.

    `queue_depth` work requests, of which at most `reads_in_flight` READs, may be outstanding on a queue pair of the
    hardware; a modelled channel has its inner channel's window instead. Raises `BadLink`.
    """

    name: str
    post_s: float = _within(1e-9, 1e-3)
    doorbell_s: float = _within(0.0, 1e-3)
    completion_s: float = _within(1e-9, 1e-3)
    wire_s: float = _within(1e-8, 1.0)
    fetch_s: float = _within(0.0, 1e-3)
    small_s_per_byte: float = _within(1e-13, 1e-6)
    gap_s: float = _within(1e-10, 1e-2)
    alpha_s: float = _within(1e-8, 1.0)
    bytes_per_s: float = _within(1e6, 1e13)
    inline_bytes: int = _within(0, 4_096)
    small_bytes: int = _within(0, 1 << 20)
    queue_depth: int = _within(1, 1 << 16)
    reads_in_flight: int = _within(1, 1 << 16)

    def __post_init__(self) -> None:
        for parameter in fields(self)[1:]:
            value, whole = getattr(self, parameter.name), parameter.type == "int"
            min_value, max_value = parameter.metadata["within"]
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                why = f"must be a {'whole ' if whole else ''}number, not {value!r}"
                raise BadLink(self.name, parameter.name, why)
            if not min_value <= value <= max_value:
                raise BadLink(self.name, parameter.name, f"{value!r} is outside of {min_value:g}..{max_value:g}")
        if self.small_s_per_byte * self.bytes_per_s < 1 - 1e-9:
            raise BadLink(self.name, "small_s_per_byte", "a byte of a small message cannot be faster than bytes_per_s")
        if self.wire_s < max(self.gap_s, self.inline_bytes / self.bytes_per_s):
            raise BadLink(self.name, "wire_s", "a message cannot arrive before it has left (gap_s, inline_bytes)")
        if self.alpha_s < self.sender_s + self.completion_s:
            raise BadLink(self.name, "alpha_s", "it is less than post_s + doorbell_s + completion_s")

    @property
    def sender_s(self) -> float:
        """Time that posting one message costs the sending processor: the work request and its doorbell."""
        return self.post_s + self.doorbell_s

    def one_way_s(self, nbytes: int) -> float:
        """Return T(n) between idle hosts."""
        if nbytes > self.small_bytes:
            return self.alpha_s + nbytes / self.bytes_per_s
        fetch_s = self.fetch_s if nbytes > self.inline_bytes else 0.0
        return self.sender_s + self.wire_s + fetch_s + max(0, nbytes - 1) * self.small_s_per_byte + self.completion_s

    def busy_s(self, nbytes: int) -> float:
        """Return how long a message keeps a port busy."""
        return max(self.gap_s, nbytes / self.bytes_per_s)

    def flight_s(self, nbytes: int) -> float:
        """Return the time from a message's start at the sender's port to its start at the receiver's: the rest of
        `one_way_s`."""
        return max(0.0, self.one_way_s(nbytes) - self.sender_s - self.busy_s(nbytes) - self.completion_s)


PARAMETERS = tuple(parameter.name for parameter in fields(Link)[1:])
"""Every parameter, in the order of the record."""
