"""The cutters by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from plait_disagg.graph.cut import Cutter
from plait_disagg.graph.mincut import MinCut
from plait_disagg.graph.prism import PrismColouring

CUTTERS: Mapping[str, Cutter] = MappingProxyType({cutter.name: cutter for cutter in (MinCut(), PrismColouring())})
"""The cutters by name: `mincut` (exact) and `prism` (the baseline)."""
