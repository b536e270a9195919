"""What the ingress is told of a plait.yaml: the settings of its HTTP side, and what the starter's models know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from plait.config import ServedConfig, ServerSection
from plait_serving.images.config import ResultsSection
from plait_serving.starter.words import image_words, ranking_words

if TYPE_CHECKING:
    from plait_serving.http.context import HttpSettings


def starter_words(config: ServedConfig) -> Mapping[str, Callable[[], Mapping[str, Any]]]:
    """Return what reads the words of the starter models that are served, by the names that requests use."""
    found: dict[str, Callable[[], Mapping[str, Any]]] = {}
    if config.images is not None:
        found |= dict.fromkeys(config.images.starters, image_words)
    if config.recommend is not None and config.recommend.models is None:
        found |= dict.fromkeys(config.ranking_models, ranking_words)
    return found


def http_settings(
    server: ServerSection,
    *,
    words: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
    results: ResultsSection | None = None,
) -> HttpSettings:
    """Return the settings of the HTTP side; called in the ingress replica, where its imports belong. `words`: what
    reads the words that a model knows."""
    from plait_serving.http.context import HttpSettings
    from plait_serving.http.edge.auth import ANYONE, ApiKey, Principal, Role
    from plait_serving.http.edge.tenants import TenantLimits
    from plait_serving.starter.preprocess import PREPROCESSORS

    without_key = Principal(tenant=ANYONE.tenant, role=Role.USER)
    keys = tuple(
        ApiKey(sha256=key.sha256, principal=Principal(tenant=key.tenant, role=Role(key.role)))
        for key in server.api_keys
    )
    tenants = {name: TenantLimits(**section.model_dump()) for name, section in server.tenants.items()}
    return HttpSettings(
        api_keys=keys,
        tenants=tenants,
        anyone=without_key if server.is_open else ANYONE,
        allowed_hosts=server.answered_hosts,
        allowed_origins=server.allowed_origins,
        trusted_proxies=server.trusted_proxies,
        a1111_api=server.a1111_api,
        max_body_bytes=server.largest_body_bytes,
        max_bodies_bytes=8 * max(server.largest_body_bytes, 64 << 20),
        preprocessors=PREPROCESSORS,
        results=results,
        words={name: read() for name, read in (words or {}).items()},
    )
