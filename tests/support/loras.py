"""LoRA files for tests: one description of factors, spelled in any format, and the weights that they should make."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.targets import LoraTargets

KOHYA = {
    "unet": "lora_unet_", "text_encoder": "lora_te_", "text_encoder_1": "lora_te1_", "text_encoder_2": "lora_te2_"
}  # fmt: skip


@dataclass(frozen=True)
class TinyFactor:
    """down ``(r, i, ...)``, up ``(o, r, ...)`` in fp32."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float | None = None


class TwoLayers(nn.Module):
    """The smallest model with a linear layer, a pointwise and a 3x3 convolution."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.lin = nn.Linear(6, 10, dtype=dtype)
            self.point = nn.Conv2d(5, 7, 1, dtype=dtype)
            self.conv = nn.Conv2d(3, 4, 3, dtype=dtype)
            self.norm = nn.LayerNorm(6, dtype=dtype)
            self.grouped = nn.Conv2d(4, 4, 3, groups=2, dtype=dtype)


def factors(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rank: int = 2,
    alpha: float | None = None,
    seed: int = 1,
    strength: float = 0.5,
) -> dict[str, TinyFactor]:
    """Random factors for weights of ``shapes``."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for module, shape in shapes.items():
        ones = [1] * (len(shape) - 2)
        down = torch.randn(rank, *shape[1:], generator=generator) / math.sqrt(math.prod(shape[1:]))
        up = torch.randn(shape[0], rank, *ones, generator=generator) * strength / math.sqrt(rank)
        made[module] = TinyFactor(down, up, alpha)
    return made


def shapes_of(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Weights that a LoRA may touch."""
    targets = LoraTargets.of({"unet": root})
    return {ref.module: shape for ref, shape in targets.shapes.items()}


def peft_tensors(made: Mapping[str, TinyFactor], component: str = "unet") -> dict[str, torch.Tensor]:
    """``unet.lin.lora_A.weight``; alpha goes to the metadata, see `peft_metadata`."""
    tensors = {}
    for module, factor in made.items():
        tensors[f"{component}.{module}.lora_A.weight"] = factor.down
        tensors[f"{component}.{module}.lora_B.weight"] = factor.up
    return tensors


def peft_metadata(component: str = "unet", **config: object) -> dict[str, str]:
    """What diffusers writes beside the tensors."""
    return {"format": "pt", "lora_adapter_metadata": json.dumps({f"{component}.{k}": v for k, v in config.items()})}


def kohya_tensors(made: Mapping[str, TinyFactor], component: str = "unet") -> dict[str, torch.Tensor]:
    """``lora_unet_lin.lora_down.weight`` and alpha (the rank if the factor has none)."""
    tensors = {}
    for module, factor in made.items():
        name = KOHYA[component] + module.replace(".", "_")
        tensors[f"{name}.lora_down.weight"] = factor.down
        tensors[f"{name}.lora_up.weight"] = factor.up
        alpha = factor.alpha if factor.alpha is not None else factor.down.shape[0]
        tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    return tensors


def lycoris_tensors(root: nn.Module, kind: str, *, seed: int = 1, strength: float = 0.4) -> dict[str, torch.Tensor]:
    """A "loha", "lokr" or "dora" file of all layers in kohya's layout, with random numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * strength

    tensors = {}
    for module, (rows, columns, *kernel) in shapes_of(root).items():
        name, width = f"lora_unet_{module.replace('.', '_')}", columns * math.prod(kernel)
        if kind == "loha":
            parts = {f"hada_w{i}_a": draw(rows, 2) for i in (1, 2)} | {f"hada_w{i}_b": draw(2, width) for i in (1, 2)}
        elif kind == "lokr":
            upper = next(n for n in (3, 2, 1) if rows % n == 0)
            parts = {
                "lokr_w1": draw(upper, 1),
                "lokr_w2_a": draw(rows // upper, 2),
                "lokr_w2_b": draw(2, width),
            }
        else:
            parts = {"lora_down.weight": draw(2, columns, *kernel), "lora_up.weight": draw(rows, 2, *[1] * len(kernel))}
            norms = root.get_submodule(module).weight.detach().flatten(1).norm(dim=1)
            parts["dora_scale"] = (norms * (1 + draw(rows))).reshape(rows, 1, *[1] * len(kernel))
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
    return tensors


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """A safetensors file; factors in ``dtype`` if one is given, numbers as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cast = {k: (v.to(dtype) if v.ndim and dtype else v).contiguous().clone() for k, v in tensors.items()}
    save_file(cast, path, metadata=dict(metadata or {"format": "pt"}))
    return path


def tiny_lora_file(folder: Path, name: str, *, seed: int = 1, **options: object) -> Path:
    """``<folder>/<name>.safetensors`` for `TwoLayers`, in PEFT format."""
    made = factors(shapes_of(TwoLayers()), seed=seed, **options)  # type: ignore[arg-type]
    return write(folder / f"{name}.safetensors", peft_tensors(made))


def loaded(folder: Path, name: str, root: nn.Module, made: Mapping[str, TinyFactor]) -> LoadedLora:
    """A parsed LoRA of ``root`` as the "unet"."""
    path = write(folder / f"{name}.safetensors", kohya_tensors(made))
    return parse(name, path, LoraTargets.of({"unet": root}))


def delta(factor: TinyFactor, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    """``scale * alpha/r * B A`` in fp64."""
    rank = factor.down.shape[0]
    alpha = factor.alpha if factor.alpha is not None else rank
    product = factor.up.double().flatten(1) @ factor.down.double().flatten(1)
    return (scale * alpha / rank * product).reshape(shape)


def snapshot(components: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Copies of all parameters by "component.path"."""
    return {
        f"{component}.{name}": value.detach().clone()
        for component, root in components.items()
        for name, value in root.named_parameters()
    }
