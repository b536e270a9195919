"""One converted model for one set of shapes, without the layers' factors where a call has none or they are merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops

from plait_kernels.executors import AdaptedLayer, Factors, RowFactors

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
                merge_factors(plain, merged.by_path[layer.path])
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


_PRODUCTS = {"MatMul", "Convolution"}
_WIDENS = {"Convert"}


def merge_factors(plain: Any, factors: Factors) -> None:
    """Put A `(1, in, r)` and B `(1, r, out)` into the weights of the layer that computes the output `plain`.

    Raises `ValueError` if no layer with such weights computes it.
    """
    product = _product(plain.get_node())
    weights = product.input(1)
    constant = weights.get_source_output().get_node()
    while constant.get_type_name() in _WIDENS:
        constant = constant.input_value(0).get_node()
    if constant.get_type_name() != "Constant":
        raise ValueError(f"the weights of {product.get_friendly_name()} are no constant")
    first, second = factors
    added = (first[0] @ second[0]).T.to(torch.float32)
    values = np.asarray(constant.data, dtype=np.float32)
    if product.get_type_name() == "MatMul" and not product.get_attributes()["transpose_b"]:
        added = added.T
    if values.size != added.numel() or values.shape[0] != added.shape[0]:
        raise ValueError(f"weights of shape {values.shape} take no factors for {tuple(added.shape)}")
    merged = values + added.contiguous().numpy().reshape(values.shape)
    weights.replace_source_output(ops.constant(merged, shared_memory=False).output(0))


def _product(node: Any) -> Any:
    """Return what multiplies by the layer's weights: `node`, or what it adds a bias to."""
    if node.get_type_name() in _PRODUCTS:
        return node
    if node.get_type_name() == "Add":
        found = [source for source in _sources(node) if source.get_type_name() in _PRODUCTS]
        if len(found) == 1:
            return found[0]
    raise ValueError(f"{node.get_friendly_name()} is no layer")


def _sources(node: Any) -> list[Any]:
    return [node.input_value(i).get_node() for i in range(node.get_input_size())]
