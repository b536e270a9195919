"""A field of requests is declared once: every other form of it is made of that."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Annotated

import pytest
from pydantic import ValidationError, create_model

from plait_serving.diffusion.request_fields import (
    Corner,
    Fraction,
    RequestField,
    body_fields,
    choice,
    given,
    request_fields,
    whole,
)
from plait_serving.diffusion.values import Edit, ImageRequest, Scheduler
from plait_serving.http.images.schemas import EditBody, EditResponse, GenerationBody, GenerationResponse


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an engine would read."""

    steps: Annotated[int, RequestField(type=whole(1, 9), name="num_steps")]
    share: Annotated[float, RequestField(type=Fraction)] = 0.5
    kind: Annotated[Scheduler | None, RequestField(type=choice(Scheduler))] = None
    corner: Annotated[tuple[int, int], RequestField(type=Corner)] = (0, 0)
    inner: str = "no client can say so"


BODY = create_model("Body", **body_fields(Asked))


def test_a_body_has_the_fields_and_gives_what_the_engine_reads() -> None:
    """By the engine's names and in its types; what is left out, or null, is not given."""
    assert list(BODY.model_fields) == ["num_steps", "share", "kind", "corner"]
    body = BODY.model_validate({"num_steps": 3, "share": -0.0, "kind": "ddim", "corner": [1, 2]}, strict=True)
    assert given(body, Asked) == {"steps": 3, "share": 0.0, "kind": Scheduler.DDIM, "corner": (1, 2)}
    assert given(BODY.model_validate({"share": None}), Asked) == {}
    for wrong in ({"num_steps": 10}, {"share": 1.5}, {"kind": "none"}, {"corner": [1]}, {"num_steps": True}):
        with pytest.raises(ValidationError):
            BODY.model_validate(wrong, strict=True)


def test_a_value_that_no_client_can_give_is_found() -> None:
    """Also where an engine is asked by somebody else."""
    declared = request_fields(Asked)
    assert (declared["steps"].default, declared["steps"].name) == (MISSING, "num_steps")
    declared["steps"].check(9)
    for name, value in (("steps", 10), ("share", float("nan")), ("share", 2.0)):
        with pytest.raises(ValidationError):
            declared[name].check(value)


@pytest.mark.parametrize(
    ("of", "body", "answer"), [(ImageRequest, GenerationBody, GenerationResponse), (Edit, EditBody, EditResponse)]
)
def test_the_api_is_made_of_what_the_engine_declares(of, body, answer) -> None:
    """Nothing is declared twice."""
    declared = request_fields(of)
    assert {each.name for each in declared.values()} <= body.model_fields.keys()
    assert {each.name for each in declared.values() if each.echoed} <= answer.model_fields.keys()
