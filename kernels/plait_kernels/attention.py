"""Attention in bfloat16 on a CPU, by OpenVINO: `softmax(q k^T / sqrt(d)) v` with scores in float32, as torch has them.

torch computes it by small products that oneDNN leaves to another library unless the processor has AMX; on AVX-512 BF16
alone they run at a fraction of what its linear layers reach (`plait bench images --size sd35m --workload single`, with
`--system plait_torch` for torch's own). OpenVINO's has no weights, and is compiled at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from plait_kernels.cores import instruction_set
from plait_kernels.executors.openvino_executor import OpenVinoSettings, available

_FEWEST_TOKENS, _LARGEST_HEAD = 256, 128
"""Fewer tokens, as text encoders have, are not worth a call; a VAE's one wide head is not what this is for."""


class FasterAttention(TorchFunctionMode):
    """Inside, torch's `scaled_dot_product_attention` is computed as above where it can be and that pays; results differ
    by rounding. For one thread at a time."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or ours."""
        del types
        function = _attention if func is scaled_dot_product_attention else func
        return function(*args, **(kwargs or {}))


def pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `FasterAttention` is faster than torch here."""
    return device.type == "cpu" and dtype is torch.bfloat16 and instruction_set() == "avx512_bf16" and available()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    is_plain = not more and not any(torch.is_tensor(option) or option for option in options.values())
    if not is_plain or not _takes(query, key, value):
        return scaled_dot_product_attention(query, key, value, *more, **options)
    heads, width = query.shape[1], query.shape[3]
    program = _program(heads, width, torch.get_num_threads())
    return program([each.contiguous() for each in (query, key, value)])


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.dim() == 4
        and query.dtype is key.dtype is value.dtype is torch.bfloat16
        and query.shape[:2] == key.shape[:2]
        and key.shape == value.shape
        and query.shape[3] == key.shape[3] <= _LARGEST_HEAD
        and min(query.shape[2], key.shape[2]) >= _FEWEST_TOKENS
    )


class _Program:
    """Attention of so many heads, for any number of rows and tokens."""

    def __init__(self, heads: int, width: int, threads: int) -> None:
        import openvino as ov
        from openvino import opset13 as operators

        from plait_kernels.executors.openvino_program import compile_model

        inputs = [operators.parameter([-1, heads, -1, width], ov.Type.bf16) for _ in range(3)]
        output = operators.scaled_dot_product_attention(*(operators.convert(each, "f32") for each in inputs))
        by_token = operators.transpose(output, operators.constant(np.array([0, 2, 1, 3])))  # as layers read it next
        model = ov.Model([by_token], inputs)
        settings = OpenVinoSettings(precision="float32", threads=lambda: threads)
        self._request = compile_model(model, settings.options()).create_infer_request()
        self._running = threading.Lock()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `bfloat16 (R, heads, L, width)`, laid out as `(R, L, heads, width)`."""
        import openvino as ov

        rows, heads, tokens, width = inputs[0].shape
        output = torch.empty(rows, tokens, heads, width)  # torch rounds it; OpenVINO 2026.4 cuts off
        with self._running:
            for i, each in enumerate(inputs):
                bits = each.view(torch.int16).numpy()
                self._request.set_input_tensor(i, ov.Tensor(bits, list(bits.shape), ov.Type.bf16))
            self._request.set_output_tensor(0, ov.Tensor(output.numpy(), shared_memory=True))
            self._request.infer()
        return output.to(torch.bfloat16).transpose(1, 2)


_program = functools.lru_cache(maxsize=8)(_Program)
