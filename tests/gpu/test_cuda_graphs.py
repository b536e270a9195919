"""CUDA graphs on a device: what `test_graphs.py` holds with a fake capture. Run as `test_operators.py` says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait_kernels.executors.graphs import GraphProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Attention(nn.Module):
    """A convolution and self-attention over its pixels: `(R, 64, h, w)` to the same, and the convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute both."""
        x = self.conv(x)
        tokens = self.qkv(x.flatten(2).transpose(1, 2)).unflatten(2, (3, 1, 64)).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(*tokens).squeeze(1).transpose(1, 2).reshape(x.shape)
        return made, x


@pytest.fixture
def module() -> nn.Module:
    """A seeded one in half precision."""
    torch.manual_seed(0)
    return Attention().half().cuda().eval().requires_grad_(requires_grad=False)


def program_of(module: nn.Module) -> GraphProgram:
    """Its graphs."""
    from plait_kernels.executors.cuda_capture import CudaCapture

    return GraphProgram(module, CudaCapture(torch.device("cuda")), name="attention")


@torch.inference_mode()
def test_replays_compute_the_module(module):
    """Several shapes and layouts in turn, each with a graph of its own; weights written between replays count."""
    program = program_of(module)
    for scale in (1.0, -0.5):
        module.conv.weight.mul_(scale)
        for shape in ((2, 64, 16, 16), (3, 64, 8, 24)):
            for layout in (torch.contiguous_format, torch.channels_last):
                for _ in range(3):
                    x = torch.randn(shape, device="cuda", dtype=torch.float16).to(memory_format=layout)
                    for ours, wanted in zip(program.run([x]), module(x), strict=True):
                        assert float((ours - wanted).abs().max()) <= 4e-3 * float(wanted.abs().max())
    assert program.graphs == 4


@torch.inference_mode()
def test_graphs_of_one_pool_do_not_write_into_each_others_answers(module):
    """What a graph lent stays while another one, of another shape, is captured and replayed."""
    program = program_of(module)
    small, large = (torch.randn(2, 64, side, side, device="cuda", dtype=torch.float16) for side in (8, 32))
    for _ in range(2):
        program.run([small])
    lent = program.run([small], copy=False)
    kept = [output.clone() for output in lent]
    for _ in range(3):
        program.run([large])
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(lent, kept, strict=True))
