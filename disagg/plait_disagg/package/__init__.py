"""A packaged model: the folder that plait serves a ranking model from.

::

    write_package(Path("picks"), module, inputs, name="picks")
    package = open_package(Path("picks"))
    ranker = WholeRanker(package.card(), package.sparse(), package.dense())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait_disagg.package.items import Items, StoredItems
from plait_disagg.package.manifest import Manifest, PackageError, read_manifest
from plait_disagg.package.read import Package, open_package

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Import the modules that trace models only when one is packaged: a worker starts faster without them."""
    if name in ("PackageOptions", "write_package"):
        from plait_disagg.package import write

        return getattr(write, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
