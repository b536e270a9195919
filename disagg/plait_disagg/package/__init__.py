"""A packaged model: the folder that plait serves a ranking model from.

::

    write_package(Path("picks"), module, inputs, name="picks")
    package = open_package(Path("picks"))
    ranker = WholeRanker(package.card(), package.sparse(), package.dense())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait_disagg.package.manifest import Manifest, PackageError, read_manifest

if TYPE_CHECKING:
    from plait_disagg.package.items import Items, StoredItems
    from plait_disagg.package.read import Package, open_package
    from plait_disagg.package.write import PackageOptions, write_package

__all__ = [
    "Items",
    "Manifest",
    "Package",
    "PackageError",
    "PackageOptions",
    "StoredItems",
    "open_package",
    "read_manifest",
    "write_package",
]


_LATER = {
    "Items": "items", "StoredItems": "items", "Package": "read", "open_package": "read",
    "PackageOptions": "write", "write_package": "write",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what needs torch, and what traces models, only when it is asked for: a manifest is read without them."""
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
