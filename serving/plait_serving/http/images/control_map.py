"""`POST /v1/images/control_maps`: what a ControlNet would see of an image, without making one."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, Field
from starlette.requests import Request

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.request_fields import OutputSize
from plait_serving.http.context import ContextDep
from plait_serving.http.edge.json_body import JsonRoute, StrictBody
from plait_serving.http.images.routes import accepted, base64_of
from plait_serving.http.images.schemas import ControlNetBody, GenerationBody, bool_or_name
from plait_serving.images.codec import OutputFormat, encode_image
from plait_serving.sections import Name

PATH = "/v1/images/control_maps"

router = APIRouter(tags=["images"], route_class=JsonRoute)

_PLACE = "controlnets.0."


class ControlMapBody(StrictBody):
    """The members of an entry of `controlnets` that its map depends on."""

    name: Name
    image: str = Field(min_length=1, repr=False, description="base64 or a data URL of a PNG, JPEG or WebP")
    preprocess: Annotated[bool | str, BeforeValidator(bool_or_name)] = True
    size: OutputSize | None = Field(None, description="of the output; unset: the first model's that takes it")


class ControlMapResponse(BaseModel):
    """The map as a PNG of the output's size."""

    b64_json: str
    size: str


@router.post(PATH, summary="What a ControlNet would see")
async def control_map(body: ControlMapBody, request: Request, context: ContextDep) -> ControlMapResponse:
    """Return the map that a generation with this entry of `controlnets` would use: stretched to the output's size, and
    with `preprocess` made from an ordinary image."""
    catalog = await context.image_service.catalog(anew=True)
    control = ControlNetBody(name=body.name, image=body.image, preprocess=body.preprocess)
    wanted: dict[str, Any] = {"size": body.size, "num_inference_steps": 1, "controlnets": [control]}
    takes = (card.name for card in catalog.models if card.controlnets is None or body.name in card.controlnets)
    generation = GenerationBody(prompt="-", model=next(takes, None), **wanted)
    try:
        asked = await accepted(generation, catalog, request, context)
        encode = partial(encode_image, asked.controlnets[0].image, OutputFormat.PNG)
        encoded = await context.workers.run(asked.tenant.name, encode)
    except EngineError as error:
        if error.param is not None:
            error.param = error.param.removeprefix(_PLACE)
        raise
    return ControlMapResponse(b64_json=base64_of(encoded), size=f"{asked.width}x{asked.height}")
