"""Which calls of a `GraphProgram` are captured, replayed or run eagerly; with a capture that needs no GPU."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from fakes.graphs import FakeCapture
from plait_kernels.executors import ExecutorError, RowFactors
from plait_kernels.executors.graphs import GraphMemory, GraphProgram, padded
from support.executors import SmallBlock, by_hand, small_block, small_factors, small_inputs


@pytest.fixture
def block() -> SmallBlock:
    """A seeded block of its own: a test may write into its weights."""
    return small_block()


@pytest.fixture
def capture() -> FakeCapture:
    """Captures without a GPU."""
    return FakeCapture()


def close(found, wanted) -> bool:
    """Equal within rounding."""
    return all(
        float((ours.double() - truth).abs().max()) <= 2e-5 * float(truth.abs().max())
        for ours, truth in zip(found, wanted, strict=True)
    )


def test_a_shape_is_captured_when_it_comes_again(block, capture):
    """Eagerly, captured, replayed; another shape, dtype or memory layout has a graph of its own. All compute the
    module."""
    program = GraphProgram(block, capture.buffers(), name="block")
    for size in ((3, 5, 7), (2, 4, 4)):
        before = len(capture.recordings)
        for turn in range(4):
            inputs = small_inputs(*size, seed=turn)
            assert close(program.run(inputs), by_hand(block, inputs))
        assert len(capture.recordings) == before + 1
        assert capture.recordings[-1].replays == 3
    x, condition = small_inputs(2, 4, 4)
    turned = x.contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        assert close(program.run([turned, condition]), by_hand(block, [x, condition]))
    assert program.graphs == 3
    assert program.layers == ()


def test_copies_stay_and_what_is_lent_is_overwritten(block):
    """`copy=False` gives the graph's own memory, which the next replay writes."""
    program = GraphProgram(block, FakeCapture().buffers(), name="block")
    inputs, others = small_inputs(2, 4, 4), small_inputs(2, 4, 4, seed=8)
    program.run(inputs)
    kept, lent = program.run(inputs), program.run(inputs, copy=False)
    again = program.run(others, copy=False)
    assert close(kept, by_hand(block, inputs))
    assert lent[0].data_ptr() == again[0].data_ptr()
    assert close(again, by_hand(block, others))


def test_a_lost_device_is_not_run_eagerly(block):
    """No later call can succeed: the error is for who ends the process."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    memory = GraphMemory(lost, budget_bytes=1 << 30)  # type: ignore[arg-type]
    program, inputs = GraphProgram(block, memory.buffers(), name="block"), small_inputs(2, 4, 4)
    program.run(inputs)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        program.run(inputs)


def test_few_shapes_that_cannot_be_captured_are_remembered(block):
    """A client chooses the shapes. One that was forgotten is tried again, and answered as before."""
    capture = FakeCapture(fails=True)
    program = GraphProgram(block, capture.buffers(), name="block", kept=2)
    for rows in (1, 2, 3, 4, 3, 1):
        for _ in range(3):
            inputs = small_inputs(rows, 4, 4)
            assert close(program.run(inputs), by_hand(block, inputs))
    assert capture.tried == 5  # of three rows once


def test_the_graphs_that_were_used_last_are_kept(block, capture):
    """Of more shapes than are kept, the one that was not used for longest goes."""
    program = GraphProgram(block, capture.buffers(), name="block", kept=2)
    for rows in (2, 1):
        for _ in range(2):
            program.run(small_inputs(rows, 4, 4))
    program.run(small_inputs(2, 4, 4))
    program.run(small_inputs(3, 4, 4))
    assert program.graphs == 1  # of two rows; that of one is gone, that of three is not captured yet
    program.run(small_inputs(2, 4, 4))
    assert capture.tried == 2


def test_a_shape_that_recurs_waits_for_a_moment_without_work(block, capture):
    """And for so many runs at most, if there is none. What came once is never captured."""
    memory = GraphMemory(capture, budget_bytes=1 << 30)
    program = GraphProgram(block, memory.buffers(), name="block", patience=5)
    inputs, once = small_inputs(2, 4, 4), small_inputs(1, 8, 8)
    program.run(once)
    for _ in range(3):
        program.run(inputs)
    assert (capture.tried, program.graphs) == (0, 0)
    assert memory.capture_waiting()
    assert not memory.capture_waiting()
    assert close(program.run(inputs), by_hand(block, inputs))
    assert program.graphs == 1
    busy = GraphProgram(block, capture.buffers(), name="block", patience=5)
    for _ in range(6):
        assert busy.graphs == 0
        busy.run(inputs)
    assert busy.graphs == 1


def test_batches_are_filled_up_to_few_sizes(block, capture):
    """At most a quarter for nothing; rows that were filled up are not seen, and change none."""
    assert [padded(rows) for rows in range(1, 34)] == [
        1, 2, 3, 4, 5, 6, 8, 8, 10, 10, 12, 12, 16, 16, 16, 16, 20, 20, 20, 20, 24, 24, 24, 24,
        32, 32, 32, 32, 32, 32, 32, 32, 40,
    ]  # fmt: skip
    program = GraphProgram(block, capture.buffers(), name="block", pads=True)
    for turn, rows in enumerate((8, 8, 7, 8, 7)):
        inputs = small_inputs(rows, 4, 4, seed=turn)
        assert close(program.run(inputs), by_hand(block, inputs))
    assert (capture.tried, program.graphs) == (1, 1)


class Doubled(nn.Module):
    """Two tensors of one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return 2 * x, x + 1


class Difference(nn.Module):
    """One tensor of two, of which the first must not be mistaken for the second."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x - y,)


def two_parts(memory: GraphMemory) -> tuple[GraphProgram, GraphProgram]:
    """Two programs over one set of buffers, of which the second reads what the first wrote."""
    buffers = memory.buffers()
    first = GraphProgram(Doubled(), buffers, name="first", inputs=lambda _: ["x"], outputs=lambda _: ["a", "b"])
    return first, GraphProgram(Difference(), buffers, name="second", inputs=lambda _: ["b", "a"])


@torch.inference_mode()
def test_what_one_program_writes_the_next_reads_where_it_is():
    """Changed in between or not; smaller shapes are views of the largest one's memory."""
    memory = GraphMemory(FakeCapture(), budget_bytes=1 << 30)
    first, second = two_parts(memory)
    for rows in (3, 3, 3, 2, 2, 3, 2):
        x = torch.arange(float(rows)) + rows
        a, b = first.run([x], copy=False)
        b += 1
        assert torch.equal(second.run([b, a])[0], 2 - x)
    taken = memory.nbytes
    assert taken == 4 * 3 * 4  # x, a, b and what the second returns, of three floats each
    a, b = first.run([torch.ones(3)], copy=False)
    assert torch.equal(second.run([b.clone(), a.clone()])[0], torch.zeros(3))  # from elsewhere, too
    assert memory.nbytes == taken


def test_a_larger_shape_moves_the_buffers_and_smaller_ones_are_captured_again():
    """One set, as large as the largest; nothing reads what is gone."""
    memory = GraphMemory(FakeCapture(), budget_bytes=1 << 30)
    first, second = two_parts(memory)
    for rows in (1, 1, 4, 4, 1):
        x = torch.arange(float(rows))
        a, b = first.run([x], copy=False)
        assert torch.equal(second.run([b, a])[0], 1 - x)
    assert (first.graphs, second.graphs, memory.nbytes) == (2, 2, 4 * 4 * 4)


def test_graphs_stay_within_their_bytes_and_the_least_used_go(capture):
    """Of a model that was used less lately. One that is too large by itself runs eagerly, and is tried again later."""
    memory = GraphMemory(capture, budget_bytes=3 * 16 * 2)
    one, two, three = (GraphProgram(Doubled(), memory.buffers(), name=str(i)) for i in range(3))
    for program in (one, two, one, two, one, three, three):  # a vector of four takes 16 bytes, thrice
        program.run([torch.ones(4)])
    assert [program.graphs for program in (one, two, three)] == [1, 0, 1]
    assert memory.nbytes == 96
    for turn in range(300):
        assert torch.equal(three.run([torch.full((32,), float(turn))])[0], torch.full((32,), 2.0 * turn))
    assert (memory.graphs, capture.tried) == (1, 3)  # that of four floats


def test_what_cannot_be_captured_runs_eagerly_and_is_tried_again_later(block, caplog):
    """No memory for a graph: the call is answered all the same, and the log says so once. What took the device's memory
    may have gone."""
    capture = FakeCapture(fails=True)
    program, inputs = GraphProgram(block, capture.buffers(), name="block"), small_inputs(2, 4, 4)
    with caplog.at_level(logging.WARNING):
        for _ in range(250):
            found = program.run(inputs)
    assert close(found, by_hand(block, inputs))
    assert (capture.tried, program.graphs) == (1, 0)
    assert sum("runs eagerly: CUDA out of memory" in record.message for record in caplog.records) == 1
    capture.fails = False
    for _ in range(10):
        program.run(inputs)
    assert (capture.tried, program.graphs) == (2, 1)


def test_factors_are_refused(block):
    """LoRA sets are merged; empty factors are none."""
    program, inputs = GraphProgram(block, FakeCapture().buffers(), name="block"), small_inputs(1, 4, 4)
    with pytest.raises(ExecutorError, match="block takes no factors"):
        program.run(inputs, small_factors([{"point": 2}]))
    assert close(program.run(inputs, RowFactors(rows=1, by_path={})), by_hand(block, inputs))
