"""Keys of tests, made from their secrets."""

from __future__ import annotations

import hashlib

from plait_serving.sections import ApiKey, Role


def api_key(secret: str, *, tenant: str, role: Role = Role.USER) -> ApiKey:
    """A key as a server keeps it."""
    return ApiKey(sha256=hashlib.sha256(secret.encode()).hexdigest(), tenant=tenant, role=role)
