"""What can be requested, on its way from an engine to an ingress."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from fakes.images import FAKE_CATALOG
from plait_serving.deployments.images.catalog_pieces import CatalogHead, CatalogPacker, unpacked
from plait_serving.images.service import AliasCard, Catalog, LoraCard

RAY_INLINE_BYTES = 100 * 1024  # a larger answer goes through the object store (`max_direct_call_object_size`)


def catalog_of(count: int) -> Catalog:
    """One with so many LoRAs, and with one of everything."""
    loras = tuple(LoraCard(name=f"a style of {i * 7919} 花", family="sdxl", format="kohya") for i in range(count))
    aliases = (AliasCard(name="other", model="emoji", loras={"noto": 0.5}),)
    return replace(FAKE_CATALOG, loras=loras, aliases=aliases, refused={"gone": "no such folder"})


def told(packer: CatalogPacker, catalog: Catalog, known: str = "") -> tuple[CatalogHead, list[bytes]]:
    """What a replica answers."""
    head, *pieces = packer.pieces(catalog, known)
    assert isinstance(head, CatalogHead)
    return head, [piece for piece in pieces if isinstance(piece, bytes)]


@pytest.mark.parametrize("count", [0, 3, 3_000, 30_000])
def test_a_catalog_crosses_in_small_answers(count: int) -> None:
    """However many LoRAs there are: Ray aborts a process for a large one that nobody waits for any more."""
    head, pieces = told(CatalogPacker(2.5), catalog_of(count))
    assert unpacked(pieces) == catalog_of(count)
    assert head.start_s == 2.5
    assert max(len(pickle.dumps(piece)) for piece in pieces) < RAY_INLINE_BYTES
    assert len(pieces) == 1 or count == 30_000


def test_what_is_known_is_not_told_again() -> None:
    """By whichever replica: equal catalogs have one digest, and others have others."""
    one, other = CatalogPacker(1.0), CatalogPacker(2.0)
    head, _ = told(one, catalog_of(3))
    assert told(one, catalog_of(3), head.digest) == (head, [])
    assert told(other, catalog_of(3), head.digest)[1] == []
    assert told(other, catalog_of(4), head.digest)[1]
