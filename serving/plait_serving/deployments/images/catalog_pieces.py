"""What gets from an engine's replica to an ingress beside events: that a request is there; and what can be requested,
only when it has changed, and in small pieces."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import TypeAdapter

from plait_serving.images.service import Catalog

PIECE_BYTES = 64 << 10
"""Ray keeps an answer of 100 KB and more in shared memory, and when such a one comes that nobody waits for any more,
its core aborts the whole process (`CoreWorker::GetOwnerAddressOrDie`, Ray 2.60)."""

_JSON = TypeAdapter(Catalog)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event of every request that reached a replica: from then on it waits for its turn, not for a
    replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogHead:
    """What a replica answers first: by what its catalog is known, and how long the replica took to start."""

    digest: str
    start_s: float


class CatalogPacker:
    """A catalog in pieces, packed once for as long as it stays the same."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._catalog: Catalog | None = None
        self._digest, self._packed = "", b""

    def pieces(self, catalog: Catalog, known: str) -> Iterator[CatalogHead | bytes]:
        """Yield the head and, unless its digest is `known`, the pieces."""
        if catalog != self._catalog:
            text = _JSON.dump_json(catalog)
            self._digest, self._packed = hashlib.sha256(text).hexdigest(), zlib.compress(text, level=1)
            self._catalog = catalog
        yield CatalogHead(digest=self._digest, start_s=self._start_s)
        if self._digest != known:
            yield from (self._packed[at : at + PIECE_BYTES] for at in range(0, len(self._packed), PIECE_BYTES))


def unpacked(pieces: Iterable[bytes]) -> Catalog:
    """Return the catalog of the pieces."""
    return _JSON.validate_json(zlib.decompress(b"".join(pieces)))
