"""What a ranking request must be: every fault is named, whatever the numbers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes import ranking_model as kit
from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import Dense, Ids
from plait_disagg.messages.check import check_request
from plait_disagg.values import ModelCard


def _i64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_right_request_passes_as_it_is() -> None:
    """Candidates are counted, tensors are passed on uncopied."""
    tensors = kit.tensors(3, 7)
    request = check_request(kit.CARD, tensors, request_id="a", deadline_s=5.0)
    assert (request.candidates, request.model, request.request_id, request.deadline_s) == (7, "tiny", "a", 5.0)
    assert all(request.tensors[name] is tensors[name] for name in tensors)


# What is wrong with a request of 3 candidates, by the input that must be named.
FAULTS: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "age: two users": ("age", {"age": torch.zeros(2, 1)}),
    "age: float64": ("age", {"age": torch.zeros(1, 1, dtype=torch.float64)}),
    "age: NaN": ("age", {"age": torch.full((1, 1), float("nan"))}),
    "price: infinite": ("price", {"price": torch.tensor([[0.0], [float("-inf")], [0.0]])}),
    "price: fewer rows": ("price", {"price": torch.zeros(2, 1)}),
    "price: not contiguous": ("price", {"price": torch.zeros(3, 2)[:, :1]}),
    "item: int32": ("item", {"item": torch.zeros(3, dtype=torch.int32)}),
    "item: beyond the table": ("item", {"item": _i64(0, 1000, 0)}),
    "item: negative": ("item", {"item": _i64(0, -1, 0)}),
    "item: two dimensions": ("item", {"item": torch.zeros(3, 1, dtype=torch.int64)}),
    "genres: float": ("genres", {"genres": torch.zeros(2)}),
    "offsets: not from 0": ("genres_offsets", {"genres": _i64(1, 2), "genres_offsets": _i64(1, 2)}),
    "offsets: short of the end": ("genres_offsets", {"genres": _i64(1, 2), "genres_offsets": _i64(0, 1)}),
    "offsets: beyond the end": ("genres_offsets", {"genres": _i64(1, 2), "genres_offsets": _i64(0, 1 << 62)}),
    "offsets: one too many": ("tags_offsets", {"tags": _i64(), "tags_offsets": _i64(0, 0, 0, 0, 0)}),
    "offsets: none": ("tags_offsets", {"tags": _i64(), "tags_offsets": _i64()}),
    "offsets: decreasing": ("tags_offsets", {"tags": _i64(1, 2, 3), "tags_offsets": _i64(0, 2, 1, 3)}),
    "offsets: wrapping around": (
        "tags_offsets",
        {"tags": _i64(1, 2, 3), "tags_offsets": _i64(0, (1 << 63) - 1, -(1 << 63), 3)},
    ),
    "offsets: int32": ("tags_offsets", {"tags_offsets": torch.zeros(4, dtype=torch.int32)}),
    "bag too long": ("tags_offsets", {"tags": torch.zeros(21, dtype=torch.int64), "tags_offsets": _i64(0, 0, 21, 21)}),
    "unknown": ("colour", {"colour": torch.zeros(1)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named(fault: str) -> None:
    """A `BadInput` whose ``param`` and message name the tensor."""
    param, changes = FAULTS[fault]
    with pytest.raises(BadInput) as caught:
        kit.request(changes=changes)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("name", list(kit.tensors()))
def test_a_missing_input_is_named(name: str) -> None:
    """Whichever is left out."""
    tensors = kit.tensors()
    del tensors[name]
    with pytest.raises(BadInput, match="missing") as caught:
        check_request(kit.CARD, tensors, request_id="a")
    assert caught.value.param == name


@pytest.mark.parametrize("candidates", [0, 5001, 10_000_000])
def test_the_number_of_candidates_is_bounded(candidates: int) -> None:
    """None is refused, and so are too many, before anything is made of them."""
    tensors = kit.tensors()
    tensors["item"] = torch.zeros(1, dtype=torch.int64).expand(candidates)  # of the size that it says, and no bytes
    with pytest.raises(BadInput, match="5000") as caught:
        check_request(kit.CARD, tensors, request_id="a")
    assert caught.value.param == "item"


def test_huge_but_finite_numbers_pass() -> None:
    """Numbers whose squares overflow are still numbers."""
    price = torch.tensor([[3e38], [-3e38], [0.0]])
    assert kit.request(changes={"price": price}).candidates == 3


def test_a_model_without_item_inputs_ranks_one_candidate() -> None:
    """There is nothing to count."""
    card = ModelCard(name="m", version="1", inputs=(Dense("age", side="user"),), outputs={"score": ()})
    assert check_request(card, {"age": torch.zeros(1, 1)}, request_id="a").candidates == 1


@pytest.mark.parametrize("value", [[0, 1000], [0, -1], [-5, 0]])
def test_ids_are_only_bounded_where_the_card_says_so(value: list[int]) -> None:
    """A table that clips or hashes takes any id."""
    inputs = (Ids("a", side="item"),)
    cards: dict[str, Any] = {"name": "m", "version": "1", "inputs": inputs, "outputs": {"score": ()}}
    tensors = {"a": torch.tensor(value)}
    assert check_request(ModelCard(**cards), tensors, request_id="a").candidates == 2
    with pytest.raises(BadInput):
        check_request(ModelCard(**cards, id_rows={"a": 1000}), tensors, request_id="a")
