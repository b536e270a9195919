"""`GET /v1/models`, `/v1/loras` and `/v1/controlnets`: what a request may name, in OpenAI's list format.

The models are the base model and the ranking models; `kind` distinguishes them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends

from plait_disagg.errors import RankError
from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.request_fields import controls, request_fields, taken
from plait_serving.diffusion.request_terms import RequestTerms
from plait_serving.diffusion.sources.names import composed
from plait_serving.diffusion.values import Edit, ImageRequest, Scheduler
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import require_admin
from plait_serving.images.infotext import SAMPLER_NAMES
from plait_serving.images.service import BaseModelCard
from plait_serving.spelling import hint

if TYPE_CHECKING:
    from plait_disagg.values import ModelCard

router = APIRouter(prefix="/v1", tags=["models"])
ADMIN = Depends(require_admin)
image_router = APIRouter(prefix="/v1", tags=["models"])
"""The routes of the lists that only a server with a base model has."""

# OpenAI's clients want a number; when the model was made is not known, and a number that changes per start would be
# worse.
CREATED_S = 0


def _listing(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": items}


def _item(kind: str, name: str, family: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": CREATED_S, "owned_by": "plait", "family": family}


def _model(card: BaseModelCard) -> dict[str, Any]:
    return {
        **_item("model", card.name, card.family),
        "kind": "base",
        "default_size": f"{card.default_width}x{card.default_height}",
        "default_num_inference_steps": card.default_steps,
        "default_guidance_scale": card.default_guidance_scale,
        "default_scheduler": card.default_scheduler.value,
        "schedulers": [scheduler.value for scheduler in card.terms.samplers.among],
        "scheduler_names": {scheduler.value: SAMPLER_NAMES[scheduler] for scheduler in card.terms.samplers.among},
        "dtype": card.dtype,
        **({} if card.controlnets is None else {"controlnets": list(card.controlnets)}),
        "limits": asdict(card.limits),
        "fields": _fields(card.terms),
        "controls": [it for it in controls(ImageRequest, card.terms.takes) if it["name"] not in _unused(card.terms)],
    }


def _unused(terms: RequestTerms) -> set[str]:
    """Return options of samplers that none of the model's has."""
    has_eta = Scheduler.DDIM in terms.samplers.among
    return {*(() if has_eta else ["eta"]), *(() if terms.samplers.spaced else ["sigmas"])}


def _fields(terms: RequestTerms) -> list[str]:
    """Return which of the fields that mean something to some models only do so to this one."""
    edits = ["image", "mask", *(each.name for each in request_fields(Edit).values())] if terms.edits else []
    reads = ["image"] if terms.reads_images and not terms.edits else []
    return [*(each.name for _, each in taken(ImageRequest, terms.takes) if each.only_some), *edits, *reads]


def _ranking_model(name: str, card: ModelCard) -> dict[str, Any]:
    from plait_serving.http.ranking.describe import metadata  # of which a server without ranking models needs nothing

    about = metadata(name, card)
    return {
        **_item("model", name, "recommender"),
        "kind": "recommender",
        "version": card.version,
        "inputs": about["inputs"],
        "outputs": about["outputs"],
        **about["parameters"],
    }


async def _models(context: RouteContext) -> dict[str, dict[str, Any]]:
    """Return the models by name, without ranking models whose workers are not available yet."""
    found: dict[str, dict[str, Any]] = {}
    if context.images is not None:
        catalog = await context.images.catalog(anew=True)
        found |= {card.name: _model(card) for card in catalog.models}
        for alias in catalog.aliases:
            card = catalog.base(alias.model)
            if card is not None:
                loras = [{"name": name, "scale": scale} for name, scale in alias.loras.items()]
                found[alias.name] = {**_model(card), "id": alias.name, "base": card.name, "loras": loras}
    for name in () if context.ranking is None else context.ranking.names():
        with suppress(RankError):
            found.setdefault(name, _ranking_model(name, context.ranking_service.get(name).card))
    return found


@router.get("/models", summary="The models")
async def models(context: ContextDep) -> dict[str, Any]:
    """List what `model` may name: the base models with their defaults and limits, the aliases, each a base model with
    LoRAs, and the ranking models. `model` may also be a base model with LoRAs: `emoji+noto:0.8`."""
    return _listing(list((await _models(context)).values()))


@router.get("/models/{model_id:path}", summary="One model")
async def model(model_id: str, context: ContextDep) -> dict[str, Any]:
    """Return one model; 404 if it does not exist."""
    found, model_id = await _models(context), composed(model_id)
    if model_id not in found:
        near = hint(model_id, found) or f"; this server has {', '.join(map(repr, found)) or 'none yet'}"
        raise NotFound(f"there is no model {model_id[:100]!r}{near}", param="model")
    return found[model_id]


@image_router.post("/models/{model_id}/sleep", summary="Let a model's weights leave memory", dependencies=[ADMIN])
async def sleep(model_id: str, context: ContextDep) -> dict[str, Any]:
    """Let the weights of a base model leave the memory of all replicas once its requests have ended. The next request
    for it, or `wake`, brings them back. Needs a key with the role admin."""
    return await _rest(model_id, context, asleep=True)


@image_router.post("/models/{model_id}/wake", summary="Bring a model's weights into memory", dependencies=[ADMIN])
async def wake(model_id: str, context: ContextDep) -> dict[str, Any]:
    """Load a base model on all replicas, beside what runs and as far as memory has room for it. Needs a key with the
    role admin."""
    return await _rest(model_id, context, asleep=False)


async def _rest(name: str, context: RouteContext, *, asleep: bool) -> dict[str, Any]:
    names, name = [card.name for card in (await context.image_service.catalog(anew=True)).models], composed(name)
    if name not in names:
        raise NotFound(f"there is no base model {name[:100]!r}{hint(name, names)}", param="model")
    await context.image_service.rest(name, asleep=asleep)
    return {"id": name, "object": "model", "asleep": asleep}


@router.get("/words", summary="The words that models know")
async def words(context: ContextDep) -> dict[str, Any]:
    """List, for the models of which it is known, what words mean to them: `concepts` that an image model can draw, and
    by the name of a ranking model's input the words for its numbers. Models that read any text are not in it."""
    found = context.settings.words
    return _listing([{"id": name, "object": "words", **found[name]} for name in sorted(found)])


@image_router.get("/loras", summary="The LoRAs")
async def loras(context: ContextDep) -> dict[str, Any]:
    """List the LoRAs that a set may name; new files appear without a restart."""
    cards = (await context.image_service.catalog(anew=True)).loras
    return _listing([{**_item("lora", card.name, card.family), "format": card.format} for card in cards])


@image_router.get("/controlnets", summary="The ControlNets")
async def controlnets(context: ContextDep) -> dict[str, Any]:
    """List the ControlNets, each with the preprocessor that `preprocess: true` runs (or null)."""
    catalog = await context.image_service.catalog(anew=True)
    items = [
        {**_item("controlnet", card.name, card.family), "preprocessor": card.preprocessor}
        for card in catalog.controlnets
    ]
    return {**_listing(items), "preprocessors": sorted(context.settings.preprocessors)}
