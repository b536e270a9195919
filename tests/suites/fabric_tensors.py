"""Conformance of channels with tensors: values, layout, alignment, lifetime and copies; see `fabric_channel`."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from plait_fabric.errors import BadHeader, BadTensor, ProtocolViolation
from plait_fabric.protocols import Channel
from plait_fabric.tensors import lease_tensor, recv_tensors, send_tensors
from suites.fabric_channel import WAIT_S

__all__ = ["TensorConformance"]


class TensorConformance:
    """What every channel guarantees about tensors. The `ends` fixture comes from `ChannelConformance`."""

    shares_memory: ClassVar[bool] = False
    """Whether the receiver reads the very memory of a sent lease (inproc, shm)."""

    def test_tensors_arrive(self, ends: tuple[Channel, Channel]) -> None:
        """Types, odd shapes, 0-dim, empty and channels-last tensors arrive equal, with their layout."""
        torch.manual_seed(0)
        images = torch.randn(2, 3, 5, 7)
        tensors = {
            "plain": torch.randn(3, 5, 7),
            "half": torch.randn(1, 1, 13).half(),
            "bfloat": torch.randn(17).bfloat16(),
            "scalar": torch.tensor(3.5),
            "ids": torch.arange(-4, 5),
            "bytes": torch.arange(251, dtype=torch.uint8),
            "mask": torch.tensor([True, False, True]),
            "empty": torch.empty(0, 4),
            "last": images.to(memory_format=torch.channels_last),
            "transposed": torch.randn(6, 4).T,
            "strided": torch.randn(6, 8)[:, ::3],
            "offset": torch.randn(10)[3:],
            "expanded": torch.randn(3, 1).expand(3, 4),
            "grad": torch.randn(3, requires_grad=True),
        }
        send_tensors(ends[0], {"step": 1}, tensors)
        with recv_tensors(ends[1], WAIT_S) as message:
            assert message.header == {"step": 1}
            assert list(message.tensors) == list(tensors)
            for name, sent in tensors.items():
                got = message.tensors[name]
                assert got.dtype == sent.dtype, name
                assert torch.equal(got, sent), name
            assert message.tensors["last"].is_contiguous(memory_format=torch.channels_last)
            assert message.tensors["transposed"].stride() == tensors["transposed"].stride()

    def test_at_most_one_copy_when_sending(self, ends: tuple[Channel, Channel]) -> None:
        """A tensor, dense or not, is copied at most once on the sending side, a lease never."""
        client, server = ends
        small, large = torch.randn(10, 3), torch.randn(64, 64, 2)
        for tensor in (small, small[:, 1], small.T, large[:, :, 0], large, torch.randn(300, 300).T):
            before = client.statistics()
            send_tensors(client, {}, {"x": tensor})
            after = client.statistics()
            assert after.copies - before.copies <= 1
            assert after.copied_bytes - before.copied_bytes <= tensor.numel() * 4
            with recv_tensors(server, WAIT_S) as message:
                assert torch.equal(message.tensors["x"], tensor)
        before = client.statistics()
        lease, tensor = lease_tensor(client.pool, (128, 65), torch.float32)
        tensor.copy_(torch.arange(128 * 65).view(128, 65))
        client.send({"n": 1}, [lease])
        assert client.statistics().copies == before.copies
        with server.recv(WAIT_S) as message:
            assert torch.equal(torch.frombuffer(message.buffers[0], dtype=torch.float32), torch.arange(128 * 65.0))
        assert server.statistics().copies == 0

    def test_received_memory_is_aligned_and_writable(self, ends: tuple[Channel, Channel]) -> None:
        """Each buffer may be viewed as any type and written to by the receiver."""
        for nbytes in (24, 48_000):
            ends[0].send({}, [b"x", bytes(nbytes), bytes(nbytes)])
            with ends[1].recv(WAIT_S) as message:
                for buffer in message.buffers[1:]:
                    tensor = torch.frombuffer(buffer, dtype=torch.float64)
                    assert tensor.data_ptr() % 8 == 0
                    assert float(tensor.add_(1).sum()) == nbytes / 8

    def test_bad_tensors_are_refused(self, ends: tuple[Channel, Channel]) -> None:
        """A tensor type that is not carried is rejected, and so is the reserved key."""
        with pytest.raises(BadTensor):
            send_tensors(ends[0], {}, {"x": torch.zeros(2, dtype=torch.complex64)})
        with pytest.raises(BadHeader):
            send_tensors(ends[0], {"_tensors": []}, {})
        with pytest.raises(BadTensor):
            ends[0].send({}, [memoryview(b"abcdef")[::2]])

    def test_buffers_outlive_the_channel(self, ends: tuple[Channel, Channel]) -> None:
        """Buffers and tensors that are still held stay readable after both ends were closed."""
        send_tensors(ends[0], {}, {"x": torch.arange(30_000)})
        message = recv_tensors(ends[1], WAIT_S)
        kept = message.tensors["x"]
        for end in ends:
            end.close()
        assert torch.equal(kept, torch.arange(30_000))
        message.release()

    def test_receiver_reads_the_senders_memory(self, ends: tuple[Channel, Channel]) -> None:
        """Where memory is shared, the received buffer is the sent lease itself: no copy on either side."""
        if not self.shares_memory:
            pytest.skip("this channel moves bytes between address spaces")
        lease, written = lease_tensor(ends[0].pool, (50, 100), torch.float32)
        written.zero_()
        ends[0].send({}, [lease])
        with ends[1].recv(WAIT_S) as message:
            read = torch.frombuffer(message.buffers[0], dtype=torch.float32).view(50, 100)
            written[3, 4] = 7.0  # against the rules, to see whether it shows
            assert read[3, 4] == 7.0
            read[5, 6] = 8.0
            assert written[5, 6] == 8.0

    @pytest.mark.parametrize(
        "described",
        [
            "no list",
            [["x", "float32", [3]]],
            [["x", "complex64", [1]]],
            [["x", "float32", [-1]]],
            [["x", "float32", [True, 2]]],
            [["x", "float32", [1, 2], [0, 0]]],
            [["x", "float32", [1 << 70, 0]]],
        ],
        ids=str,
    )
    def test_wrong_descriptions_are_refused(self, ends: tuple[Channel, Channel], described: object) -> None:
        """A description that does not fit its buffer is a violation; the message is released and the channel stays
        usable."""
        ends[0].send({"_tensors": described}, [bytes(8)])
        with pytest.raises(ProtocolViolation) as caught:
            recv_tensors(ends[1], WAIT_S)
        assert caught.value.channel_usable
        assert ends[1].statistics().open_messages == 0
        send_tensors(ends[0], {}, {"x": torch.ones(2)})
        with recv_tensors(ends[1], WAIT_S) as message:
            assert torch.equal(message.tensors["x"], torch.ones(2))
