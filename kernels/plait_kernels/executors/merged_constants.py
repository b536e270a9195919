"""A LoRA set merged into a converted model's constants: the weights W of a layer become W + (A @ B)^T.

A copy of the model for one set computes nothing more than the module does; with factors as inputs a small model
computes about as much again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from openvino import opset13 as ops

from plait_kernels.executors import Factors

_PRODUCTS = {"MatMul", "Convolution"}
_WIDENS = {"Convert"}


def merge(plain: Any, factors: Factors) -> None:
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
