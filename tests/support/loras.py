"""LoRA files for tests: one description of factors, spelled in any format, and the weights that they should make."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.configs import build_on_meta
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.diffusion.values import LoraRef

K = TypeVar("K")
Tensors = Mapping[str, torch.Tensor]
KOHYA = {
    "unet": "lora_unet_", "text_encoder": "lora_te_", "text_encoder_1": "lora_te1_", "text_encoder_2": "lora_te2_"
}  # fmt: skip
DOWN_UP, A_B = ("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight")


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
    shapes: Mapping[K, tuple[int, ...]],
    *,
    rank: int = 2,
    alpha: float | None = None,
    seed: int = 1,
    strength: float = 0.5,
) -> dict[K, TinyFactor]:
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


def spelled(
    made: Mapping[str, TinyFactor], ends: tuple[str, str], alpha: float | None = None
) -> dict[str, torch.Tensor]:
    """A file of these factors, down and up, each under its layer's name with one of the ends."""
    tensors = {}
    for layer, factor in made.items():
        tensors |= {f"{layer}.{ends[0]}": factor.down, f"{layer}.{ends[1]}": factor.up}
        if alpha is not None:
            tensors[f"{layer}.alpha"] = torch.tensor(alpha)
    return tensors


def peft_tensors(made: Mapping[str, TinyFactor], component: str = "unet") -> dict[str, torch.Tensor]:
    """``unet.lin.lora_A.weight``; alpha goes to the metadata, see `peft_metadata`."""
    return spelled({f"{component}.{module}": factor for module, factor in made.items()}, A_B)


def peft_metadata(component: str = "unet", **config: object) -> dict[str, str]:
    """What diffusers writes beside the tensors."""
    return {"format": "pt", "lora_adapter_metadata": json.dumps({f"{component}.{k}": v for k, v in config.items()})}


def kohya_tensors(made: Mapping[str, TinyFactor], component: str = "unet") -> dict[str, torch.Tensor]:
    """``lora_unet_lin.lora_down.weight`` and alpha (the rank if the factor has none)."""
    tensors = {}
    for module, factor in made.items():
        alpha = factor.alpha if factor.alpha is not None else factor.down.shape[0]
        tensors |= spelled({KOHYA[component] + module.replace(".", "_"): factor}, DOWN_UP, float(alpha))
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


def tiny_lora_file(folder: Path, name: str, *, seed: int = 1) -> Path:
    """``<folder>/<name>.safetensors`` for `TwoLayers`, in PEFT format."""
    return write(folder / f"{name}.safetensors", peft_tensors(factors(shapes_of(TwoLayers()), seed=seed)))


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


def merged(
    parts: Mapping[str, nn.Module], lora: LoadedLora, scale: float, read: Callable[[], Tensors] | None = None
) -> dict[str, torch.Tensor]:
    """All parameters, or what ``read`` gives, with the LoRA in them; checks that a restore leaves no trace."""
    before, merger = snapshot(parts), Merger(parts)
    merger.switch((LoraRef(name=lora.name, scale=scale),), {lora.name: lora})
    after = {key: value.clone() for key, value in read().items()} if read else snapshot(parts)
    merger.switch((), {})
    assert all(torch.equal(value, before[key]) for key, value in snapshot(parts).items())
    return after


def small_parts(name: FamilyName, folders: Collection[str]) -> dict[str, nn.Module]:
    """These parts of a published architecture in small, with random weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        parts = {part.folder: build_on_meta(part) for part in scaled_down(name).parts if part.folder in folders}
        for part in parts.values():
            for tensor in part.to_empty(device="cpu").state_dict().values():
                tensor.normal_(std=0.3)
    return parts
