"""Tensors over a channel: described in the header, carried as bytes, viewed on arrival.

Header entry `_tensors`: a list of `[name, dtype, shape]` or `[name, dtype, shape, order]`, one per
buffer. `order` lists the dimensions from the outermost to the innermost in memory and is present
only when that is not the row-major order (channels-last, transposed), so such tensors arrive with
the layout that they were sent with, and no copy is made to reorder them.

Copies on the sending side: a dense CPU tensor costs none here (the channel reads its memory: 1
copy into the segment for shm and inproc, 0 for tcp); one on a GPU or with gaps is copied once,
straight into a lease of the channel's pool, and the channel makes no other copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch

from plait_fabric.errors import BadHeader, BadTensor, ProtocolViolation
from plait_fabric.memory.pool import Lease, Pool, release_all
from plait_fabric.protocols import Buffer, Channel, Header
from plait_fabric.values import Message

KEY = "_tensors"
MAX_DIMENSIONS = 16
MAX_SIZE = 1 << 48

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in "float32 float16 bfloat16 float64 int64 int32 int16 int8 uint8 bool".split()  # noqa: SIM905
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Order = tuple[int, ...] | None
"""The dimensions from the outermost to the innermost in memory; None means row-major."""


class TensorMessage:
    """A received message with its tensors, which view the channel's memory until `release()`.

    They are writable. Clone what must outlive the message.
    """

    def __init__(self, message: Message, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self._message = message
        self.header = header
        self.tensors = tensors
        """By name; empty after the release."""

    def release(self) -> None:
        """Release the memory. Raises `LeaseMisuse` on the second call."""
        self.tensors = {}
        self._message.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.tensors = {}
        self._message.__exit__(*error)


def send_tensors(
    channel: Channel,
    header: Header,
    tensors: Mapping[str, torch.Tensor],
    *,
    timeout_s: float | None = None,
) -> None:
    """Send named tensors in one message. They may be changed as soon as this returns.

    Raises `BadTensor`, `BadHeader` (the key `_tensors` is taken), and whatever `Channel.send` raises.
    """
    channel.send(*pack_tensors(channel.pool, header, tensors, timeout_s=timeout_s), timeout_s=timeout_s)


def pack_tensors(
    pool: Pool, header: Header, tensors: Mapping[str, torch.Tensor], *, timeout_s: float | None = None
) -> tuple[dict[str, Any], list[Buffer]]:
    """Make the message that `send_tensors` sends, for a channel with that pool. Raises `BadTensor`, `BadHeader`,
    `PoolExhausted`."""
    if KEY in header:
        raise BadHeader(f"the header key {KEY!r} belongs to the fabric")
    described: list[list[Any]] = []
    buffers: list[Buffer] = []
    try:
        for name, tensor in tensors.items():
            entry, buffer = _describe(pool, name, tensor, timeout_s)
            described.append(entry)
            buffers.append(buffer)
    except BaseException:
        release_all(buffers)
        raise
    return {**header, KEY: described}, buffers


def recv_tensors(channel: Channel, timeout_s: float | None = None) -> TensorMessage:
    """Receive a message that was sent by `send_tensors`. Raises what `Channel.recv` raises.

    A description that does not fit its buffers raises `ProtocolViolation` (that message is
    released, the channel is usable).
    """
    return tensors_of(channel.recv(timeout_s))


def tensors_of(message: Message) -> TensorMessage:
    """View the tensors of a message, which now belongs to the result."""
    header = dict(message.header)
    try:
        tensors = _view_all(header.pop(KEY, []), message.buffers)
    except ProtocolViolation:
        message.release()
        raise
    return TensorMessage(message, header, tensors)


def lease_tensor(pool: Pool, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Lease, torch.Tensor]:
    """Return a lease and a row-major tensor over it: compute into the tensor, then send the lease without a copy."""
    lease = pool.acquire(math.prod(shape) * dtype.itemsize)
    return lease, _view(lease.memory, dtype, shape, None)


def _describe(pool: Pool, name: str, tensor: torch.Tensor, timeout_s: float | None) -> tuple[list[Any], Buffer]:
    dtype_name = _NAMES.get(tensor.dtype)
    if dtype_name is None or tensor.layout is not torch.strided:
        raise BadTensor(f"tensor {name!r} is {tensor.dtype}, {tensor.layout}; the fabric carries {sorted(DTYPES)}")
    tensor = tensor.detach().resolve_neg()
    entry: list[Any] = [name, dtype_name, list(tensor.shape)]
    if not tensor.numel():
        return entry, b""
    dense = tensor.is_contiguous()
    if not dense:
        order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
        in_memory = tensor.permute(order)
        if in_memory.is_contiguous():
            entry.append(order)
            tensor, dense = in_memory, True
    if dense and tensor.device.type == "cpu":
        return entry, bytes_of(tensor)
    lease = pool.acquire(tensor.numel() * tensor.dtype.itemsize, timeout_s)
    _view(lease.memory, tensor.dtype, tuple(tensor.shape), None).copy_(tensor)
    pool.count_copy(lease.nbytes)
    return entry, lease


def bytes_of(contiguous: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory."""
    if contiguous.dtype is torch.bfloat16:  # numpy has no such type
        contiguous = contiguous.view(torch.int16)
    array: Any = contiguous.numpy()
    return memoryview(array)


def _view_all(described: Any, buffers: tuple[memoryview, ...]) -> dict[str, torch.Tensor]:
    if not isinstance(described, list) or len(described) != len(buffers):
        raise ProtocolViolation("the peer's tensor list does not fit its buffers", channel_usable=True)
    tensors: dict[str, torch.Tensor] = {}
    for entry, buffer in zip(described, buffers, strict=True):
        name, dtype, shape, order = _check_entry(entry)
        if math.prod(shape) * dtype.itemsize != buffer.nbytes:
            raise ProtocolViolation(f"tensor {name!r} does not fill its buffer", channel_usable=True)
        tensors[name] = _view(buffer, dtype, shape, order)
    return tensors


def _check_entry(entry: Any) -> tuple[str, torch.dtype, tuple[int, ...], Order]:
    if not isinstance(entry, list) or len(entry) not in {3, 4}:
        raise ProtocolViolation("the peer described a tensor wrongly", channel_usable=True)
    name, dtype_name, shape, *rest = entry
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None or not isinstance(name, str) or not _are_sizes(shape) or not _are_orders(rest, len(shape)):
        raise ProtocolViolation(f"the peer described tensor {name!r} wrongly", channel_usable=True)
    return name, dtype, tuple(shape), tuple(rest[0]) if rest else None


def _are_sizes(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape)  # a bool is no size


def _are_orders(orders: list[Any], dimensions: int) -> bool:
    return all(
        isinstance(order, list) and {type(dim) for dim in order} <= {int} and sorted(order) == list(range(dimensions))
        for order in orders
    )


def _view(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], order: Order) -> torch.Tensor:
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype)
    if order is None:
        return flat.view(shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(inverse)
