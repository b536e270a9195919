"""One converted model for one set of shapes, without the layers' factors where a call has none or they are merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov

from plait_kernels.executors import AdaptedLayer, RowFactors
from plait_kernels.executors.merged_constants import merge

Shape = tuple[int, ...]


def fixed(
    model: Any,
    layers: Sequence[AdaptedLayer],
    *,
    inputs: Sequence[Shape],
    given: int,
    ranks: Sequence[int],
    merged: RowFactors | None = None,
) -> Any:
    """Return a copy of `model` for these input shapes, `given` rows of factors (`RowFactors.given`) and ranks, one for
    each layer; 0 removes a layer's factors. `merged`: the factors of all rows, to put into the weights; ranks are 0.

    Raises RuntimeError or `ValueError` if the graph is not what `conversion` makes.
    """
    copy = model.clone()
    ports = list(copy.inputs)
    sizes = {port: ov.PartialShape(list(size)) for port, size in zip(ports, inputs, strict=False)}
    for i, (layer, rank) in enumerate(zip(layers, ranks, strict=True)):
        first, second = ports[len(inputs) + 2 * i], ports[len(inputs) + 2 * i + 1]
        if rank:
            sizes[first] = ov.PartialShape([given, layer.width_in, rank])
            sizes[second] = ov.PartialShape([given, rank, layer.width_out])
        else:
            plain = _cut_off(second)
            if merged is not None and layer.path in merged.by_path:
                merge(plain, merged.by_path[layer.path])
            copy.remove_parameter(first.get_node())
            copy.remove_parameter(second.get_node())
    copy.reshape(sizes)
    return copy


def _cut_off(factor: Any) -> Any:
    """Replace the sum that the product with `factor` leads to by its other operand, and return that."""
    port = factor
    while True:
        targets = list(port.get_target_inputs())
        if len(targets) != 1:
            raise ValueError(f"a factor leads to {len(targets)} operations")
        node = targets[0].get_node()
        if node.get_type_name() == "Add":
            other = node.input_value(1 - targets[0].get_index())
            node.output(0).replace(other)
            return other
        port = node.output(0)
