"""Forms that were tried for the recommender's dense half, at real shapes, and did not take the eager form's place.

The operators are small and stay as the models write them: on a CPU the whole dense half runs as an OpenVINO program
where that is faster (`plait_disagg/dense`). Dot interaction: Criteo Kaggle's DLRM (27 vectors of 16), and of 64. Cross
layer: MLPerf's DCNv2, 3,456 wide through rank 512.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from plait_bench.errors import SystemUnavailable
from plait_bench.kernels.cases import Arguments, Form, OperatorCase

__all__ = ["tried_cases"]

TRIED, OV = "tried", "openvino"
_ROWS = (64, 512)


def tried_cases() -> list[OperatorCase]:
    """Return the cases: a form that was tried beside the eager one and OpenVINO's program of the same."""
    dots = [_dot(27, width, rows) for width in (16, 64) for rows in _ROWS]
    return dots + [_cross(3456, 512, rows) for rows in _ROWS]


class _Dot(nn.Module):
    """`[z_0, strictly lower triangle of Z Z^T]` for Z `(R, F, d)`, as `plait_disagg.models.dlrm`."""

    pairs: torch.Tensor

    def __init__(self, fields: int) -> None:
        super().__init__()
        lower = torch.tril_indices(fields, fields, offset=-1)
        self.register_buffer("pairs", lower[0] * fields + lower[1])

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        products = torch.bmm(z, z.transpose(1, 2)).flatten(1)
        return torch.cat([z[:, 0], products[:, self.pairs]], dim=1)

    def tried(self, z: torch.Tensor) -> torch.Tensor:
        """Select by columns straight behind the first vector, in the result's own memory."""
        width = z.shape[2]
        made = z.new_empty(len(z), width + len(self.pairs))
        made[:, :width] = z[:, 0]
        products = torch.bmm(z, z.transpose(1, 2)).flatten(1)
        made[:, width:] = torch.index_select(products, 1, self.pairs)
        return made


class _Cross(nn.Module):
    """`x_0 * (W V x + b) + x`, as `plait_disagg.models.dcn`."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        crossed: torch.Tensor = x0 * self.up(self.down(x)) + x
        return crossed

    def tried(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Multiply and add in one pass, over the product's own memory."""
        product = self.up(self.down(x))
        return torch.addcmul(x, x0, product, out=product)


def _dot(fields: int, width: int, rows: int) -> OperatorCase:
    module = _Dot(fields)
    pairs = fields * (fields - 1) // 2

    def make(device: str, dtype: torch.dtype) -> Arguments:
        return (torch.randn(rows, fields, width, device=device, dtype=dtype),)

    return OperatorCase(
        name=f"tried-dot-{fields}x{width}-{rows}",
        op="dot_interaction",
        moved=rows * (fields * width + width + pairs),
        make=make,
        plait=None,
        eager=module.forward,
        others={TRIED: lambda: module.tried, OV: lambda: _program(module, make("cpu", torch.float32))},
        compiles=False,
    )


def _cross(width: int, rank: int, rows: int) -> OperatorCase:
    module = _Cross(width, rank).eval().requires_grad_(False)

    def make(device: str, dtype: torch.dtype) -> Arguments:
        return tuple(torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))

    return OperatorCase(
        name=f"tried-cross-{width}-{rank}-{rows}",
        op="cross_layer",
        moved=rows * 3 * width + 2 * width * rank,
        make=make,
        plait=None,
        eager=module.forward,
        others={TRIED: lambda: module.tried, OV: lambda: _program(module, make("cpu", torch.float32))},
        flops=4.0 * rows * width * rank,
        compiles=False,
    )


def _program(module: nn.Module, example: Arguments) -> Form:
    """Return an OpenVINO program for these shapes. Raises `SystemUnavailable`."""
    try:
        import openvino as ov
    except ImportError as error:
        raise SystemUnavailable(f"{OV}: {error}") from error
    shapes = [tuple(each.shape) for each in example]
    model = ov.convert_model(module, example_input=example, input=shapes)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32",
    }  # fmt: skip
    request: Any = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

    def run(*arguments: torch.Tensor) -> torch.Tensor:
        found = request.infer([each.numpy() for each in arguments], share_inputs=True, share_outputs=True)
        return torch.from_numpy(next(iter(found.values())))

    form: Callable[..., torch.Tensor] = run
    return form
