"""``GET /v1/models``, ``/v1/loras`` and ``/v1/controlnets``: what a request may name, in OpenAI's list form."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.values import Scheduler
from plait_serving.http.context import ContextDep
from plait_serving.http.service import ModelCard

router = APIRouter(prefix="/v1", tags=["models"])

# OpenAI's clients want a number; when the model was made is not known, and a number that changes per start would be
# worse.
CREATED_S = 0


def _listing(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": items}


def _item(kind: str, name: str, family: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": CREATED_S, "owned_by": "plait", "family": family}


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        **_item("model", card.name, card.family),
        "default_size": f"{card.default_width}x{card.default_height}",
        "default_num_inference_steps": card.default_steps,
        "default_guidance_scale": card.default_guidance_scale,
        "default_scheduler": card.default_scheduler.value,
        "schedulers": [scheduler.value for scheduler in Scheduler],
        "limits": asdict(card.limits),
    }


@router.get("/models", summary="The base model")
async def models(context: ContextDep) -> dict[str, Any]:
    """The models that ``model`` may name, with their defaults and limits."""
    return _listing([_model((await context.service.catalog()).model)])


@router.get("/models/{model_id:path}", summary="One model")
async def model(model_id: str, context: ContextDep) -> dict[str, Any]:
    """One model; 404 if it does not exist."""
    card = (await context.service.catalog()).model
    if model_id != card.name:
        raise NotFound(f"there is no model {model_id[:100]!r}; this server has {card.name!r}", param="model")
    return _model(card)


@router.get("/loras", summary="The LoRAs")
async def loras(context: ContextDep) -> dict[str, Any]:
    """The LoRAs that a set may name; new files appear without a restart."""
    cards = (await context.service.catalog()).loras
    return _listing([{**_item("lora", card.name, card.family), "format": card.format} for card in cards])


@router.get("/controlnets", summary="The ControlNets")
async def controlnets(context: ContextDep) -> dict[str, Any]:
    """The ControlNets, each with the preprocessor that ``preprocess: true`` runs (or null)."""
    catalog = await context.service.catalog()
    items = [
        {**_item("controlnet", card.name, card.family), "preprocessor": card.preprocessor}
        for card in catalog.controlnets
    ]
    return {**_listing(items), "preprocessors": list(catalog.preprocessors)}
