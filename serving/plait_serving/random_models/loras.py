"""A LoRA file for an architecture, with the layers that training scripts choose and the keys that they write.

peft: diffusers' training scripts; the queries, keys, values and outputs of all attentions. kohya: sd-scripts; every
linear layer and pointwise convolution of the UNet's or the model's transformers and of the text encoders' layers, with
half the rank as alpha, and for all but SD 1 and 2 the names of the original code. Of transformers it is their own part
alone, as the scripts train it by default. Symbols as in `plait_kernels.lora_merge`: A `(r, D)`,
B `(o, r)`, alpha.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.key_formats import LoraFormat, format_of, is_text
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef
from plait_serving.diffusion.published.architectures import Architecture
from plait_serving.diffusion.published.configs import build_on_meta, published_name
from plait_serving.diffusion.sources.staging import new_file
from plait_serving.random_models import DtypeName, LoraSpelling
from plait_serving.random_models.write import METADATA, DrawnTensor, Report, write_tensors

MAX_RANK = 4096
"""What plait's reader takes."""

STRENGTH = 0.1
"""Standard deviation of B@A beside that of the weight that it is added to."""

_FACTORS: Mapping[LoraSpelling, tuple[str, str]] = {
    LoraSpelling.PEFT: ("lora_A", "lora_B"),
    LoraSpelling.KOHYA: ("lora_down", "lora_up"),
}
_LAYERS: Mapping[LoraSpelling, re.Pattern[str]] = {
    LoraSpelling.PEFT: re.compile(
        r"attentions\.\d+\..*\.attn[12]\.to_(q|k|v|out\.0)$|\.self_attn\.(q|k|v|out)_proj$"
        r"|transformer_blocks\.\d+\.attn\.(to_(q|k|v|out\.0|add_out)|add_[qkv]_proj)$"
    ),
    LoraSpelling.KOHYA: re.compile(r"(^|\.)attentions\.\d+\.|(^|\.)encoder\.layers\.\d+\."),
}
_SGM_START = ("lora_unet_input_blocks_", "lora_unet_middle_block_", "lora_unet_output_blocks_")
_TRANSFORMER_START = ("lora_unet_double_blocks_", "lora_unet_single_blocks_", "lora_unet_joint_blocks_")


def write_lora(
    architecture: Architecture,
    path: Path,
    *,
    spelling: LoraSpelling,
    rank: int,
    seed: int,
    dtype: DtypeName,
    report: Report,
) -> None:
    """Write a new file; the same arguments give the same bytes, and both spellings the same factors of a layer.

    Raises `LoraError` for a rank or an architecture that cannot be, and `ModelError` if the file exists or the disk is
    too full.
    """
    tensors = drawn_factors(architecture, spelling=spelling, rank=rank)
    total = sum(tensor.nbytes(dtype) for tensor in tensors)
    metadata = dict(METADATA)
    if spelling is LoraSpelling.KOHYA:
        metadata |= {
            "ss_network_module": "networks.lora",
            "ss_network_dim": str(rank),
            "ss_network_alpha": str(rank / 2),
        }
    with new_file(path, needed_bytes=total) as staged:
        for written in accumulate(write_tensors(staged, tensors, seed=seed, dtype=dtype, metadata=metadata)):
            report(path.name, written, total)


def drawn_factors(architecture: Architecture, *, spelling: LoraSpelling, rank: int) -> list[DrawnTensor]:
    """Return the tensors of a LoRA file. Raises `LoraError`."""
    if not 1 <= rank <= MAX_RANK:
        raise LoraError(f"rank {rank} is not between 1 and {MAX_RANK}")
    if architecture.pipeline is None:
        raise LoraError("a LoRA is for a base model, not for a ControlNet")
    of_transformer = any(part.folder == "transformer" for part in architecture.parts)
    adapted = ("transformer",) if of_transformer else ("unet", "text_encoder", "text_encoder_2")
    modules = {part.folder: build_on_meta(part) for part in architecture.parts if part.folder in adapted}
    targets = LoraTargets.of(modules)
    made: list[DrawnTensor] = []
    for stem, ref in _kohya_layers(targets) if spelling is LoraSpelling.KOHYA else _peft_layers(targets):
        shape = targets.shapes[ref]
        if spelling is LoraSpelling.KOHYA:
            made.append(DrawnTensor(key=f"{stem}.alpha", label="", shape=(), mean=rank / 2))
        down, up = _FACTORS[spelling]
        made += (_down(f"{stem}.{down}.weight", ref, shape, rank), _up(f"{stem}.{up}.weight", ref, shape, rank))
    return made


def _peft_layers(targets: LoraTargets) -> Iterator[tuple[str, ModuleRef]]:
    for ref in targets.shapes:
        if _LAYERS[LoraSpelling.PEFT].search(ref.module):
            yield f"{ref.component}.{_published(ref)}", ref


def _kohya_layers(targets: LoraTargets) -> Iterator[tuple[str, ModuleRef]]:
    spellings = defaultdict(list)
    for name, ref in targets.names.items():
        if format_of(name) is not LoraFormat.KOHYA:
            continue
        spellings[ref].append(name)
        if name.startswith(_TRANSFORMER_START):
            yield name, ref
    two_encoders = any(ref.component == "text_encoder_2" for ref in targets.shapes)
    for ref in targets.shapes:
        if _LAYERS[LoraSpelling.KOHYA].search(ref.module):
            yield _kohya_stem(ref, spellings[ref], two_encoders=two_encoders), ref


def _kohya_stem(ref: ModuleRef, spellings: list[str], *, two_encoders: bool) -> str:
    """Return the one of the names that plait's reader takes which sd-scripts writes."""
    if ref.component == "unet":
        sgm = [name for name in spellings if name.startswith(_SGM_START)]
        return sgm[0] if two_encoders else next(name for name in spellings if name not in sgm)
    prefix = {"text_encoder": "lora_te1_" if two_encoders else "lora_te_", "text_encoder_2": "lora_te2_"}
    return prefix[ref.component] + _published(ref).replace(".", "_")


def _published(ref: ModuleRef) -> str:
    return published_name(ref.module) if is_text(ref.component) else ref.module


def _down(key: str, ref: ModuleRef, shape: tuple[int, ...], rank: int) -> DrawnTensor:
    """Return A `(r, i, ...)`, scaled by the fan-in as the weight is."""
    return DrawnTensor(key=key, label=f"{ref}.down", shape=(rank, *shape[1:]), std=1 / math.sqrt(math.prod(shape[1:])))


def _up(key: str, ref: ModuleRef, shape: tuple[int, ...], rank: int) -> DrawnTensor:
    """Return B `(o, r)`, with the ones of a pointwise convolution."""
    ones = (1,) * (len(shape) - 2)
    return DrawnTensor(key=key, label=f"{ref}.up", shape=(shape[0], rank, *ones), std=STRENGTH / math.sqrt(rank))
