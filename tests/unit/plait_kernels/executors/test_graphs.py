"""Which calls of a `GraphProgram` are captured, replayed or run eagerly; with a capture that needs no GPU."""

from __future__ import annotations

import logging

import pytest
import torch

from fakes.graphs import FakeCapture
from plait_kernels.executors import ExecutorError, RowFactors
from plait_kernels.executors.graphs import GraphProgram
from support.executors import SmallBlock, by_hand, small_block, small_factors, small_inputs


@pytest.fixture
def block() -> SmallBlock:
    """A seeded block of its own: a test may write into its weights."""
    return small_block()


def close(found, wanted) -> bool:
    """Equal within rounding."""
    return all(
        float((ours.double() - truth).abs().max()) <= 2e-5 * float(truth.abs().max())
        for ours, truth in zip(found, wanted, strict=True)
    )


def test_a_shape_is_captured_when_it_comes_again(block):
    """Eagerly, captured, replayed; another shape, dtype or memory layout has a graph of its own. All compute the
    module."""
    capture = FakeCapture()
    program = GraphProgram(block, capture, name="block")
    for size in ((2, 4, 4), (3, 5, 7)):
        before = len(capture.recordings)
        for turn in range(4):
            inputs = small_inputs(*size, seed=turn)
            assert close(program.run(inputs), by_hand(block, inputs))
            assert program.settled == (turn > 0)
        assert len(capture.recordings) == before + 1
        assert capture.recordings[-1].replays == 3
    x, condition = small_inputs(2, 4, 4)
    turned = x.contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        assert close(program.run([turned, condition]), by_hand(block, [x, condition]))
    assert program.graphs == 3
    assert program.layers == ()


def test_what_is_written_into_the_weights_holds_in_the_next_replay(block):
    """A LoRA merge writes in place: no address changes, nothing is captured again."""
    capture = FakeCapture()
    program, inputs = GraphProgram(block, capture, name="block"), small_inputs(2, 4, 4)
    for _ in range(2):
        program.run(inputs)
    addresses = [parameter.data_ptr() for parameter in block.parameters()]
    with torch.no_grad():
        block.point.weight.mul_(-2.0)
    assert close(program.run(inputs), by_hand(block, inputs))
    assert [parameter.data_ptr() for parameter in block.parameters()] == addresses
    assert capture.tried == 1


def test_weights_that_moved_are_captured_again_after_forget(block):
    """`forget` drops what reads the old addresses."""
    capture = FakeCapture()
    program, inputs = GraphProgram(block, capture, name="block"), small_inputs(2, 4, 4)
    for _ in range(2):
        program.run(inputs)
    program.forget()
    assert program.graphs == 0
    for _ in range(2):
        program.run(inputs)
    assert capture.tried == 2


def test_copies_stay_and_what_is_lent_is_overwritten(block):
    """`copy=False` gives the graph's own memory, which the next replay writes."""
    program = GraphProgram(block, FakeCapture(), name="block")
    inputs, others = small_inputs(2, 4, 4), small_inputs(2, 4, 4, seed=8)
    program.run(inputs)
    kept, lent = program.run(inputs), program.run(inputs, copy=False)
    again = program.run(others, copy=False)
    assert close(kept, by_hand(block, inputs))
    assert lent[0].data_ptr() == again[0].data_ptr()
    assert close(again, by_hand(block, others))


def test_what_cannot_be_captured_runs_eagerly_and_is_tried_once(block, caplog):
    """No memory for a graph: the call is answered all the same, and the log says so once."""
    capture = FakeCapture(fails=True)
    program, inputs = GraphProgram(block, capture, name="block"), small_inputs(2, 4, 4)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert close(program.run(inputs), by_hand(block, inputs))
    assert capture.tried == 1
    assert program.settled
    assert sum("runs eagerly: CUDA out of memory" in record.message for record in caplog.records) == 1


def test_a_lost_device_is_not_run_eagerly(block):
    """No later call can succeed: the error is for who ends the process."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    program, inputs = GraphProgram(block, lost, name="block"), small_inputs(2, 4, 4)
    program.run(inputs)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        program.run(inputs)


def test_few_shapes_that_cannot_be_captured_are_remembered(block):
    """A client chooses the shapes. One that was forgotten is tried again, and answered as before."""
    capture = FakeCapture(fails=True)
    program = GraphProgram(block, capture, name="block", kept=2)
    for rows in (1, 2, 3, 4, 3, 1):
        for _ in range(3):
            inputs = small_inputs(rows, 4, 4)
            assert close(program.run(inputs), by_hand(block, inputs))
    assert capture.tried == 5  # of three rows once


def test_the_graphs_that_were_used_last_are_kept(block):
    """Of more shapes than are kept, the one that was not used for longest goes."""
    capture = FakeCapture()
    program = GraphProgram(block, capture, name="block", kept=2)
    for rows in (1, 2):
        for _ in range(2):
            program.run(small_inputs(rows, 4, 4))
    program.run(small_inputs(1, 4, 4))
    program.run(small_inputs(3, 4, 4))
    assert program.graphs == 1  # of one row; that of two is gone, that of three is not captured yet
    program.run(small_inputs(1, 4, 4))
    assert capture.tried == 2


def test_factors_are_refused(block):
    """LoRA sets are merged; empty factors are none."""
    program, inputs = GraphProgram(block, FakeCapture(), name="block"), small_inputs(1, 4, 4)
    with pytest.raises(ExecutorError, match="block takes no factors"):
        program.run(inputs, small_factors([{"point": 2}]))
    assert close(program.run(inputs, RowFactors(rows=1, by_path={})), by_hand(block, inputs))
