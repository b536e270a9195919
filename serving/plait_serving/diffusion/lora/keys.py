"""The meaning of a key of a LoRA file: its module, and whether it is the down factor, the up factor or alpha.

Down is A `(r, i, ...)`, up is B `(o, r, ...)`; the names of LoHa, LoKr and DoRA are LyCORIS' own. A difference is what
is added as it is, to a bias or to a weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    DIFFERENCE = auto()


@dataclass(frozen=True, slots=True)
class KeyMeaning:
    """A key that was understood."""

    ref: ModuleRef
    role: TensorRole


# Kinds of files that are not read, by what only their keys contain. Names as their authors use them.
_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (
        r"(query|key)_norm\.scale$|\.norm_(added_)?[qk]\.weight$",
        "a control LoRA (FLUX.1 Canny or Depth), which replaces norms and widens the model's input",
    ),
    (r"\.lora_mid\.", "LoCon with a Tucker core (LyCORIS)"),
    (r"\.on_input$", "IA3 (LyCORIS)"),
    (r"\.oft_|\.boft_|\.oft_blocks", "OFT/BOFT"),
    (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA"),
    (r"lora_embedding_[AB]", "a LoRA of an embedding"),
    (r"\.lora_(B|up)(\.[^.]+)?\.bias$|\.lora\.up\.bias$", "a LoRA with biases"),
    (r"^emb_params$", "a textual inversion"),
    (r"^lora_controlnet$", "Control-LoRA"),
    (r"^(model\.diffusion_model|first_stage_model|cond_stage_model|conditioner)\.", "a whole model"),
    (r"^(lora_te\d|text_encoder_[23])[._]encoder[._]block[._]", "a LoRA with a part for T5, which stays as it is"),
)

# Whose names they are, of files for other models.
_OTHERS: tuple[tuple[str, str], ...] = (
    (r"(down|up|input|output|mid|middle)_blocks?[._]", "Stable Diffusion 1, 2 or XL"),
    (r"to_qkv_mlp_proj|(double|single)_stream_modulation", "FLUX.2"),
    (r"(double|single)_blocks[._]|single_transformer_blocks[._]", "FLUX.1"),
    (r"joint_blocks[._]", "Stable Diffusion 3"),
    (r"transformer_blocks[._]\d+[._]attn2[._]", "Stable Diffusion 3.5 Medium"),
    (r"transformer_blocks[._]\d+[._](img|txt)_(mlp|mod)", "Qwen-Image"),
    (r"(^|[._])layers[._]\d+[._](attention|feed_forward|adaLN_modulation)[._]", "Z-Image"),
    (r"^(lora_|lycoris_)?transformer[._]", "a transformer, as Stable Diffusion 3 and FLUX.1 are"),
)

_PEFT_START = "base_model.model."
_FAL = re.compile(re.escape(_PEFT_START) + r"(double_blocks|single_blocks|final_layer)\.")
"""What fal's trainer of FLUX.1 Kontext writes: the original model's names. diffusers takes the rank for its alpha."""
_BARE = (
    "the file is a bare PEFT adapter (key {key!r}), whose alpha is in another file; keep adapter_config.json beside it"
)

# PEFT puts the adapter's name into a key, or nothing where it saved a parameter.
_PEFT_ENDING = re.compile(r"\.(lora_A|lora_B|lora_magnitude_vector)(?:(?:\.[^.]+)?\.weight)?$")

_OF_BIAS = (".diff_b", ".b_norm")
_DOWN_UP = ("lora_", "lora_linear_layer.", "lora.", "")  # the empty one last: the others end like it
_ROLES: tuple[tuple[str, TensorRole], ...] = (
    *((f".{role.name.lower()}", role) for role in TensorRole if role.name.startswith(("HADA_", "LOKR_", "DORA_"))),
    (".lora_A.weight", TensorRole.DOWN),
    (".lora_B.weight", TensorRole.UP),
    (".lora_magnitude_vector.weight", TensorRole.MAGNITUDE),
    *((f".{start}down.weight", TensorRole.DOWN) for start in _DOWN_UP),
    *((f".{start}up.weight", TensorRole.UP) for start in _DOWN_UP),
    (".alpha", TensorRole.ALPHA),
    (".diff", TensorRole.DIFFERENCE),
    (".w_norm", TensorRole.DIFFERENCE),
    *((suffix, TensorRole.DIFFERENCE) for suffix in _OF_BIAS),
)
_ADDS = frozenset({TensorRole.UP, TensorRole.DIFFERENCE})

# The oldest diffusers files name attention processors: UNet to_out is layer 0 of a Sequential, CLIP says q_proj.
_OLD_UNET = {"to_out": "to_out.0"}
_OLD_CLIP = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def reject_unsupported(found: Mapping[str, KeyMeaning | None], *, has_config: bool) -> None:
    """Raise `LoraError`, naming the kind, if the file is of a kind that is not read: by keys that mean nothing.
    `has_config`: it is an adapter of PEFT's with its configuration."""
    bare = next((key for key in found if key.startswith(_PEFT_START) and not _FAL.match(key)), None)
    if bare is not None and not has_config:
        raise LoraError(_BARE.format(key=bare))
    unknown = [key for key, what in found.items() if what is None and not may_add_nothing(key)]
    for pattern, name in _UNSUPPORTED:
        example = next(filter(re.compile(pattern).search, unknown), None)
        if example is not None:
            raise LoraError(f"the file is {name} (key {example!r}); LoRA, LoHa, LoKr and DoRA are read")


def other_model(keys: Iterable[str], targets: LoraTargets) -> str | None:
    """Return which other model keys that match nothing are made for, as far as their names tell."""
    keys = list(keys)
    for pattern, model in _OTHERS:
        found = re.compile(pattern).search
        if any(map(found, keys)) and not any(map(found, targets.names)):
            return model
    return None


def meaning(key: str, targets: LoraTargets) -> KeyMeaning | None:
    """Return the meaning of `key`, or None if it names nothing of the family that its role may change."""
    stem, role = _parts(key)
    found = _find(stem, targets)
    if found is None or role is None:
        return None
    ref = found._replace(parameter="bias" if key.endswith(_OF_BIAS) else "weight")
    is_there = ref in (targets.parameters if role is TensorRole.DIFFERENCE else targets.shapes)
    return KeyMeaning(ref, role) if is_there else None


def may_add_nothing(key: str) -> bool:
    """Return whether `key` may be of a layer that only ComfyUI's text encoders have: CLIP-L's projection, and the last
    layer of OpenCLIP-H, which no image depends on. `LoraSave` writes zeros for them."""
    return key.startswith("text_encoders.") and _parts(key)[1] in {TensorRole.DOWN, *_ADDS}


def adds(key: str) -> bool:
    """Return whether what `key` holds is zero only if nothing is added to its module."""
    return _parts(key)[1] in _ADDS


def _parts(key: str) -> tuple[str, TensorRole | None]:
    """Return a key's name for its module, and its role there; None: it has none that is known."""
    plain = _PEFT_ENDING.sub(r".\1.weight", key.removeprefix(_PEFT_START))
    for suffix, role in _ROLES:
        if plain.endswith(suffix):
            return plain.removesuffix(suffix), role
    return plain, None


def _find(stem: str, targets: LoraTargets) -> ModuleRef | None:
    """Return the module that a name means, also as `unet....attn1.processor.to_q` and in other old spellings."""
    plain = stem.replace(".processor.", ".")
    parent, _, leaf = plain.rpartition(".")
    leaf = leaf.removesuffix("_lora")
    old = (f"{parent}.{table.get(leaf, leaf)}" for table in (_OLD_UNET, _OLD_CLIP))
    return next((targets.names[name] for name in (stem, plain, *old) if name in targets.names), None)
