"""Arrays to a model's tensors: which spellings are the same, which datatypes are converted, what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.ranking import FAKE_CARD
from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import Bag, Dense
from plait_disagg.messages.check import check_request
from plait_serving.ranking.inputs import Binder
from support.http_rank import arrays

BINDER = Binder(FAKE_CARD.inputs)


def bind(**changes):
    sent = {name: array for name, array in (arrays(3) | changes).items() if array is not None}
    return BINDER.bind(sent)


def test_the_tensors_own_their_memory():
    """A body's views are read-only and lie at any address; what the ranker gets is neither."""
    raw = b"x" + arrays(3)["item"].tobytes()
    view = np.frombuffer(raw, np.int64, 3, 1)
    tensors = bind(item=view)
    assert tensors["item"].data_ptr() % 8 == 0
    tensors["item"] += 1
    np.testing.assert_array_equal(tensors["item"].numpy(), view + 1)


def test_lengths_stand_for_offsets():
    """Both spellings of a bag give the same tensors, empty rows included."""
    lengths = np.diff(arrays(3)["genres_offsets"])
    by_lengths = bind(genres_offsets=None, genres_lengths=lengths.astype(np.int32))
    by_offsets = bind()
    assert torch.equal(by_lengths["genres_offsets"], by_offsets["genres_offsets"])
    assert "genres_lengths" not in by_lengths


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_sizes_of_one_do_not_matter(shape):
    """(N,) and (N, 1) are the same for a number and for an id."""
    sent = arrays(3)
    tensors = bind(price=sent["price"].reshape(shape), item=sent["item"].reshape(shape))
    assert (tensors["price"].shape, tensors["item"].shape) == ((3, 1), (3,))


@pytest.mark.parametrize("dtype", ["f2", "f8", "i1", "i4", "i8", "u2", "u8", ">f4", ">i8"])
def test_other_types_are_converted(dtype):
    """Small numbers are exact in every type, of either byte order; ids may have any type of integers."""
    numbers = np.array([1, 2, 100], dtype)
    tensors = bind(price=numbers[:, None], **({"item": numbers} if numbers.dtype.kind in "iu" else {}))
    assert tensors["price"].tolist() == [[1.0], [2.0], [100.0]]
    assert tensors["item"].dtype == torch.int64
    assert numbers.dtype.kind == "f" or tensors["item"].tolist() == [1, 2, 100]


def test_float64_is_rounded_to_the_nearest_float32():
    """As numpy rounds; an overflow becomes infinity, which the check of values refuses."""
    tensors = bind(price=np.array([[0.1], [1 / 3], [1e300]]))
    assert tensors["price"][:, 0].tolist() == [float(np.float32(0.1)), float(np.float32(1 / 3)), float("inf")]


def array(*values, dtype=np.int64):
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"item": None}, "item", "missing"),
        ({"genres_offsets": None}, "genres", "genres_offsets or genres_lengths"),
        ({"genres_lengths": array(1, 1, 1)}, "genres", "not both"),
        ({"itm": array(1)}, "itm", "did you mean item"),
        ({"person": array(1, 2)}, "person", r"shape \[2\]; expected \[1\]"),
        ({"mood": np.zeros((1, 4), np.float32)}, "mood", r"\[rows, 3\]"),
        ({"item": np.zeros(1001, np.int64)}, "item", "1 to 1000"),
        ({"price": np.zeros((4, 1), np.float32)}, "price", r"shape \[4, 1\]; expected \[3, 1\]"),
        ({"genres_offsets": array()}, "genres_offsets", r"shape \[0\]; expected \[4\]"),
        ({"item": array(1, 2, 3, dtype=np.float32)}, "item", "INT64"),
        ({"item": array(1, 2, 2**63, dtype=np.uint64)}, "item", "does not fit"),
        ({"price": array([1], [2], [2**24 + 1])}, "price", "2\\^24"),
    ],
)
def test_what_does_not_fit_is_named(changes, param, says):
    """Missing, unknown, shaped or typed otherwise, by the binder or the check: BadInput with the input's name."""
    with pytest.raises(BadInput, match=says) as caught:
        check_request(FAKE_CARD, bind(**changes), request_id="r")
    assert caught.value.param == param


@pytest.mark.parametrize("lengths", [array(2, -1, 2), array(1, 1, 2), array(0, 0, 0), array(2**62, 2**62, 0)])
def test_lengths_that_do_not_add_up_are_refused(lengths):
    """Negative, too few, too many, and sums that would overflow."""
    with pytest.raises(BadInput) as caught:
        bind(genres=array(0, 1, 2), genres_offsets=None, genres_lengths=lengths)
    assert caught.value.param == "genres_lengths"


def test_an_input_may_be_called_like_a_bags_lengths():
    """Then that name is the input's, and the bag takes offsets only."""
    binder = Binder((Bag("a"), Dense("a_lengths")))
    sent = {"a": array(1, 2), "a_offsets": array(0, 1, 2), "a_lengths": np.ones(2, np.float32)}
    tensors = binder.bind(sent)
    assert tensors["a_lengths"].tolist() == [[1.0], [1.0]]
    with pytest.raises(BadInput, match="none is there"):
        binder.bind({name: sent[name] for name in ("a", "a_lengths")})
