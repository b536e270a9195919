"""Authentication: bearer keys with a tenant and a role.

Without configured keys, every caller is the tenant "default", with the role admin where only this machine reaches the
server (127.0.0.1, the default), and as a user anywhere else. Keys are kept as sha256 digests, so neither a
configuration dump nor a core file reveals them.

Clients of A1111's API know nothing but HTTP Basic: below its paths, and only there, the password may be the key. A
browser adds such a password by itself, so it is no proof that a page may ask (`hosts.py`), and no answer invites one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from plait_serving.http.edge.errors import A1111, ApiError
from plait_serving.sections import ApiKey, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The tenant and role behind a request."""

    tenant: str
    role: Role


ANYONE = Principal(tenant="default", role=Role.ADMIN)
OPEN_PATHS = frozenset({"/health", "/version", "/v2/health/live", "/v2/health/ready"})
"""The paths that a load balancer may request without a key."""
FILES_OF_THE_PAGE = "/ui/"
"""What the paths of the page's files begin with."""
RESULTS = "/v1/images/results/"
"""What the paths of kept images begin with. Their names are secrets that end by themselves."""
_PAGES = frozenset({"/", "/docs"})


def is_open(path: str) -> bool:
    """Return whether a path needs no key: probes, kept images, and the pages, which have nothing in them but ask for a
    key."""
    return path in OPEN_PATHS or path in _PAGES or path.startswith((FILES_OF_THE_PAGE, RESULTS))


def authenticate(
    header: str | None, keys: Sequence[ApiKey], *, anyone: Principal = ANYONE, basic: bool = False
) -> Principal:
    """Return the principal of an `Authorization` header: `anyone` if there are no keys. Compares every key, each in
    constant time. `basic`: the key may be the password of HTTP Basic, with any name. Raises a 401 `ApiError`."""
    if not keys:
        return anyone
    scheme, _, secret = (header or "").partition(" ")
    if basic and scheme.lower() == "basic":
        secret = _password(secret)
    elif scheme.lower() != "bearer":
        secret = ""
    headers = {} if basic else {"www-authenticate": "Bearer"}
    if not secret.strip():
        how = "Authorization: Bearer KEY" + (", or HTTP Basic with the key as the password" if basic else "")
        raise ApiError(401, f"send an API key: {how}", code="missing_api_key", headers=headers)
    digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).hexdigest()
    found = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
    if not found:
        raise ApiError(401, "the API key is not valid", code="invalid_api_key", headers=headers)
    return Principal(tenant=found[0].tenant, role=found[0].role)


def _password(encoded: str) -> str:
    """Return the password of HTTP Basic's credentials, or all of them if they have no name."""
    try:
        text = base64.b64decode(encoded.strip(), validate=True).decode("utf-8", "surrogateescape")
    except ValueError:
        return ""
    name, colon, password = text.partition(":")
    return password if colon else name


def has_valid_key(header: str | None, keys: Sequence[ApiKey]) -> bool:
    """Return whether an `Authorization` header has one of the keys."""
    try:
        return bool(keys) and bool(authenticate(header, keys))
    except ApiError:
        return False


def identify(scope: Scope, *, keys: Sequence[ApiKey], anyone: Principal) -> None:
    """Put the `Principal` into a request's state, unless its path is open. Raises a 401 `ApiError`."""
    if not is_open(scope["path"]):
        header, basic = Headers(scope=scope).get("authorization"), scope["path"].startswith(A1111)
        scope["state"]["principal"] = authenticate(header, keys, anyone=anyone, basic=basic)


def tenant_in(scope: Scope) -> str:
    """Return the tenant that a request is of, or nothing where it needs no key."""
    who: Principal | None = scope.get("state", {}).get("principal")
    return "" if who is None else who.tenant


def principal(request: Request) -> Principal:
    """Return the request's principal; a FastAPI dependency."""
    found = request.state.principal
    assert isinstance(found, Principal)
    return found


def require_admin(request: Request) -> Principal:
    """Return an admin's principal; a FastAPI dependency. Raises a 403 `ApiError` unless the key's role is admin."""
    found = principal(request)
    if found.role is not Role.ADMIN:
        raise ApiError(403, "this needs a key with the role admin", code="admin_required")
    return found
