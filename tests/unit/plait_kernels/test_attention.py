"""Attention by OpenVINO: as near to float64 as torch's, for any rows and lengths, and only where it is asked for."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from torch.nn.functional import scaled_dot_product_attention as attention

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels import attention as faster
from plait_kernels.attention import FasterAttention, pays


def made(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def error(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The distance to float64, as a share."""
    wanted = attention(q.double(), k.double(), v.double())
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that OpenVINO computes."""
    seen: list[tuple[int, ...]] = []
    call = faster._Program.__call__

    def counted(self, inputs):
        seen.append(tuple(inputs[0].shape))
        return call(self, inputs)

    monkeypatch.setattr(faster._Program, "__call__", counted)
    return seen


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_it_is_as_near_to_float64_as_torch(programs: list[tuple[int, ...]], scale: float) -> None:
    """Scores stay in float32: rounded to bfloat16 they would make it two to six times as far."""
    for rows, tokens in ((2, 300), (1, 257), (3, 512)):
        q, k, v = (made(rows, 3, tokens, 64, seed=i, scale=scale if i == 0 else 1.0) for i in range(3))
        with FasterAttention():
            got = attention(q, k, v, dropout_p=0.0, is_causal=False)
        assert got.shape == q.shape
        assert error(got, q, k, v) < 1.05 * error(attention(q, k, v), q, k, v)
    assert programs == [(2, 3, 300, 64), (1, 3, 257, 64), (3, 3, 512, 64)]


def test_inputs_may_have_any_strides(programs: list[tuple[int, ...]]) -> None:
    """Heads are split from a layer's output without a copy; the result reads on as layers want it."""
    q, k, v = (made(2, 300, 3, 64, seed=i).transpose(1, 2) for i in range(3))
    with FasterAttention():
        got = attention(query=q, key=k, value=v, attn_mask=None, scale=None)
    assert error(got, q, k, v) < 2e-3
    assert got.transpose(1, 2).is_contiguous()
    assert len(programs) == 1


def test_the_rest_is_torchs(programs: list[tuple[int, ...]]) -> None:
    """Masks, causal ones, other dtypes, short texts, wide heads: bit for bit."""
    q = made(1, 2, 300, 64, seed=0)
    mask = torch.zeros(300, 300).bfloat16()
    short, wide = made(1, 2, 77, 64, seed=1), made(1, 1, 300, 512, seed=2)
    for args, options in (
        ((q, q, q), {"attn_mask": mask}),
        ((q, q, q), {"is_causal": True}),
        ((q, q, q), {"scale": 0.5}),
        ((q.float(),) * 3, {}),
        ((short,) * 3, {}),
        ((wide,) * 3, {}),
    ):
        with FasterAttention():
            got = attention(*args, **options)
        assert torch.equal(got, attention(*args, **options))
    assert programs == []


def test_it_pays_for_bfloat16_on_a_cpu_only() -> None:
    """Elsewhere nothing changes."""
    assert not pays(torch.device("cpu"), torch.float32)
    assert not pays(torch.device("cuda"), torch.bfloat16)


def test_diffusers_transformers_ask_for_it(programs: list[tuple[int, ...]]) -> None:
    """SD3.5's joint and second attention, FLUX's double and single blocks; outputs as near to float32."""
    sizes = {"num_layers": 1, "num_attention_heads": 2, "pooled_projection_dim": 8, "joint_attention_dim": 16}
    sd3 = SD3Transformer2DModel(
        sample_size=32, in_channels=4, out_channels=4, attention_head_dim=16, caption_projection_dim=32,
        pos_embed_max_size=16, dual_attention_layers=(0,), qk_norm="rms_norm", **sizes,
    )  # fmt: skip
    flux = FluxTransformer2DModel(
        in_channels=16, num_single_layers=1, attention_head_dim=16, axes_dims_rope=(4, 6, 6), **sizes
    )
    places = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(16.0), torch.arange(16.0), indexing="ij"), -1)
    text = {"encoder_hidden_states": made(2, 40, 16, seed=1), "pooled_projections": made(2, 8, seed=2)}
    for model, given in (
        (sd3, {"hidden_states": made(2, 4, 32, 32, seed=0), "timestep": torch.tensor([500.0, 20.0])}),
        (flux, {
            "hidden_states": made(2, 256, 16, seed=0), "timestep": torch.tensor([0.5, 0.02]).bfloat16(),
            "img_ids": places.reshape(256, 3), "txt_ids": torch.zeros(40, 3),
        }),
    ):  # fmt: skip
        with torch.inference_mode():
            asked = {**given, **text, "return_dict": False}
            wide = model.eval().float()(**{k: v.float() if torch.is_tensor(v) else v for k, v in asked.items()})[0]
            theirs = model.bfloat16()(**asked)[0]
            programs.clear()
            with FasterAttention():
                ours = model(**asked)[0]
        assert programs == [(2, 2, 296, 16), (2, 2, 256, 16)] if model is sd3 else programs == [(2, 2, 296, 16)] * 2
        assert (ours - wide).abs().mean() <= 1.2 * (theirs - wide).abs().mean()
