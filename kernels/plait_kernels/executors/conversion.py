"""torch modules to OpenVINO models, through a trace. Needs the `openvino` package.

The frontend is called directly: `openvino.convert_model` would trace a second time to compare (the probe in
`openvino_executor` does that on outputs), and reports usage over the network.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

from plait_kernels.executors import MODULES, AdaptedLayer, Computation, ExecutorError, InputSpec
from plait_kernels.executors.adapters import Twin

_EXAMPLE_RANK = 2
_ELEMENTS = {torch.int64: ov.Type.i64, torch.int32: ov.Type.i32, torch.bool: ov.Type.boolean}
_WORTH_HALVING = 1024  # elements from which a constant's half precision copy is looked for


def convert(computation: Computation) -> tuple[Any, tuple[AdaptedLayer, ...]]:
    """Return the `openvino.Model` of a computation, every varying axis dynamic, and its adapted layers.

    The model shares its constants' memory with the module's parameters. Raises `ExecutorError`.
    """
    with MODULES:
        try:
            return _convert(computation)
        finally:
            _forget_traces()


def _forget_traces() -> None:
    """Free what torch keeps of every trace for good: 18 MB of half a UNet of 0.4 M parameters."""
    kept: Any = torch.jit._recursive.concrete_type_store
    kept.type_store.clear()
    kept.methods_compiled.clear()
    torch._C._jit_clear_class_registry()


def _convert(computation: Computation) -> tuple[Any, tuple[AdaptedLayer, ...]]:
    try:
        twin = Twin(computation)
        specs = list(computation.inputs)
        example = [
            value.float() if value.is_floating_point() else value.detach().clone() for value in computation.example
        ]
        rows = example[0].shape[0]
        for layer in twin.layers:
            example += [
                torch.zeros(rows, layer.width_in, _EXAMPLE_RANK),
                torch.zeros(rows, _EXAMPLE_RANK, layer.width_out),
            ]
            specs += [
                InputSpec(name=f"{layer.path}.A", shape=(None, layer.width_in, None)),
                InputSpec(name=f"{layer.path}.B", shape=(None, None, layer.width_out)),
            ]
        traced = _trace(twin, example)
        known = computation.operators
        unknown = sorted(traced_operators(traced) - known) if known is not None else []
        if unknown:
            raise ExecutorError(f"{', '.join(unknown)} is not known to be computed as torch does")
        model = _through_frontend(traced, example)
        _set_shapes(model, specs)
    except Exception as error:
        raise ExecutorError(f"conversion failed: {' '.join(str(error).split())[:300]}") from error
    return model, twin.layers


def save(model: Any, path: Path) -> None:
    """Write `path` (.xml) and its weights beside it (.bin), which are memory-mapped when read.

    Large constants that float16 holds without loss, as those of float16 files, are stored so.
    """
    _halve_constants(model)
    ov.save_model(model, path, compress_to_fp16=False)


def _trace(module: torch.nn.Module, example: list[torch.Tensor]) -> Any:
    with warnings.catch_warnings(), torch.no_grad(), torch.inference_mode(mode=False):
        warnings.simplefilter("ignore")  # the tracer warns of every Python branch on a shape
        trace: Any = torch.jit.trace
        return trace(module, tuple(example), check_trace=False, strict=False)


def traced_operators(traced: Any) -> frozenset[str]:
    """Return the names of torch's operators in a trace, such as `aten::linear`."""
    found: set[str] = set()
    blocks = [traced.inlined_graph]
    while blocks:
        for node in blocks.pop().nodes():
            found.add(node.kind())
            blocks.extend(node.blocks())
    return frozenset(kind for kind in found if kind.startswith("aten::"))


def _through_frontend(traced: Any, example: list[torch.Tensor]) -> Any:
    decoder = TorchScriptPythonDecoder(traced, example_input=tuple(example))
    frontend = FrontEndManager().load_by_framework("pytorch")
    return ov.Model(frontend.convert(frontend.load(decoder)))


def _set_shapes(model: Any, specs: list[InputSpec]) -> None:
    if len(model.inputs) != len(specs):
        raise ExecutorError(f"the traced graph has {len(model.inputs)} inputs, not {len(specs)}")
    for port, spec in zip(model.inputs, specs, strict=True):
        port.node.set_partial_shape(ov.PartialShape([-1 if size is None else size for size in spec.shape]))
        port.node.set_element_type(_ELEMENTS.get(spec.dtype, ov.Type.f32))
        port.node.set_friendly_name(spec.name)
        port.tensor.set_names({spec.name})
    model.validate_nodes_and_infer_types()


def _halve_constants(model: Any) -> None:
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
            continue
        values = node.data
        if values.size < _WORTH_HALVING:
            continue
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.array_equal(half.astype(np.float32), values):
            widened = ops.convert(ops.constant(half, dtype=ov.Type.f16, shared_memory=False), "f32")
            node.output(0).replace(widened.output(0))
