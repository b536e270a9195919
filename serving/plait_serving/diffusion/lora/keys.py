"""The meaning of a key of a LoRA file: its module, and whether it is the down factor, the up factor or alpha.

Down is A `(r, i, ...)`, up is B `(o, r, ...)`; the names of LoHa, LoKr and DoRA are LyCORIS' own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef


class TensorRole(Enum):
    """The role of a tensor in its module."""

    DOWN = auto()
    UP = auto()
    ALPHA = auto()
    MAGNITUDE = auto()
    DORA_SCALE = auto()
    HADA_W1_A = auto()
    HADA_W1_B = auto()
    HADA_W2_A = auto()
    HADA_W2_B = auto()
    HADA_T1 = auto()
    HADA_T2 = auto()
    LOKR_W1 = auto()
    LOKR_W1_A = auto()
    LOKR_W1_B = auto()
    LOKR_W2 = auto()
    LOKR_W2_A = auto()
    LOKR_W2_B = auto()
    LOKR_T2 = auto()


class LoraFormat(Enum):
    """How a file spells its keys; the value is the format's common name."""

    PEFT = "peft"
    KOHYA = "kohya"


@dataclass(frozen=True, slots=True)
class KeyMeaning:
    """A key that was understood."""

    ref: ModuleRef
    role: TensorRole
    format: LoraFormat


# Kinds of files that are not read, by what only their keys contain. Names as their authors use them.
_UNSUPPORTED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\.lora_mid\.", "LoCon with a Tucker core (LyCORIS)"),
        (r"\.on_input$", "IA3 (LyCORIS)"),
        (r"\.oft_|\.boft_|\.oft_blocks", "OFT/BOFT"),
        (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA"),
        (r"\.diff(_b)?$", "a full difference of weights (LyCORIS `full`)"),
        (r"\.(w|b)_norm$", "trained norm layers (LyCORIS)"),
        (r"lora_embedding_[AB]", "a LoRA of an embedding"),
        (r"\.lora_(B|up)\.bias$|\.lora\.up\.bias$", "a LoRA with biases"),
        (r"^bundle_emb\.|^emb_params$", "a textual inversion"),
        (r"^lora_controlnet$", "Control-LoRA"),
        (r"^(lora_)?transformer[._]|double_blocks|joint_blocks", "a LoRA for a transformer model (Flux, SD3 or alike)"),
        (r"^(model\.diffusion_model|first_stage_model|cond_stage_model|conditioner)\.", "a whole model"),
    )
)

_PEFT_START = "base_model.model."
_BARE = (
    "the file is a bare PEFT adapter (key {key!r}), whose alpha is in another file; keep adapter_config.json beside it"
)

# LyCORIS' names, which PEFT has as well.
_LYCORIS_ROLES: tuple[tuple[str, TensorRole], ...] = tuple(
    (f".{role.name.lower()}", role) for role in TensorRole if role.name.startswith(("HADA_", "LOKR_", "DORA_"))
)
_ROLES: tuple[tuple[str, TensorRole], ...] = (
    *_LYCORIS_ROLES,
    (".lora_magnitude_vector", TensorRole.MAGNITUDE),
    (".lora_magnitude_vector.weight", TensorRole.MAGNITUDE),
    (".lora_magnitude_vector.default.weight", TensorRole.MAGNITUDE),
    (".lora_A.weight", TensorRole.DOWN),
    (".lora_B.weight", TensorRole.UP),
    (".lora_A.default.weight", TensorRole.DOWN),
    (".lora_B.default.weight", TensorRole.UP),
    (".lora_linear_layer.down.weight", TensorRole.DOWN),
    (".lora_linear_layer.up.weight", TensorRole.UP),
    (".lora.down.weight", TensorRole.DOWN),
    (".lora.up.weight", TensorRole.UP),
    ("_lora.down.weight", TensorRole.DOWN),
    ("_lora.up.weight", TensorRole.UP),
    (".alpha", TensorRole.ALPHA),
)
_KOHYA_ROLES: tuple[tuple[str, TensorRole], ...] = (
    *_LYCORIS_ROLES,
    (".lora_down.weight", TensorRole.DOWN),
    (".lora_up.weight", TensorRole.UP),
    (".alpha", TensorRole.ALPHA),
)
_KOHYA_START = ("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_")

# The oldest diffusers files name attention processors: UNet to_out is layer 0 of a Sequential, CLIP says q_proj.
_OLD_UNET = {"to_out": "to_out.0"}
_OLD_CLIP = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def reject_unsupported(keys: Iterable[str], *, has_config: bool) -> None:
    """Raise `LoraError`, naming the kind, if the file is of a kind that is not read. `has_config`: it is an adapter of
    PEFT's with its configuration."""
    for key in keys:
        if key.startswith(_PEFT_START) and not has_config:
            raise LoraError(_BARE.format(key=key))
        for pattern, name in _UNSUPPORTED:
            if pattern.search(key):
                raise LoraError(f"the file is {name} (key {key!r}); LoRA, LoHa, LoKr and DoRA are read")


def meaning(key: str, targets: LoraTargets) -> KeyMeaning | None:
    """Return the meaning of `key`, or None if it names no module of the family."""
    if key.startswith(_KOHYA_START):
        for suffix, role in _KOHYA_ROLES:
            if key.endswith(suffix):
                ref = targets.kohya.get(key.removesuffix(suffix))
                return KeyMeaning(ref, role, LoraFormat.KOHYA) if ref else None
        return None
    dotted = key.removeprefix(_PEFT_START)
    for suffix, role in _ROLES:
        if dotted.endswith(suffix):
            ref = _dotted(dotted.removesuffix(suffix), targets)
            return KeyMeaning(ref, role, LoraFormat.PEFT) if ref else None
    return None


def _dotted(stem: str, targets: LoraTargets) -> ModuleRef | None:
    """Return the module that `unet....attn1.processor.to_q` and its modern spellings name."""
    stem = stem.replace(".processor.", ".")
    ref = targets.dotted.get(stem)
    if ref is not None:
        return ref
    parent, _, leaf = stem.rpartition(".")
    leaf = leaf.removesuffix("_lora")
    for table in (_OLD_UNET, _OLD_CLIP):
        ref = targets.dotted.get(f"{parent}.{table.get(leaf, leaf)}")
        if ref is not None:
            return ref
    return None
