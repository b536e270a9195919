"""What files of weights look like from outside: their names and the names of their tensors. Loads no library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plait_serving.diffusion.published.architectures import FamilyName

__all__ = ["PICKLE", "SUFFIX", "UNET", "VAE", "family_of_keys", "is_pickle", "stem_of"]

SUFFIX = ".safetensors"
PICKLE = "a pickle, which can run code when it is loaded; get or save it as .safetensors"
_PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")

UNET, VAE = "model.diffusion_model.", "first_stage_model."
_TEXTS: Mapping[str, FamilyName] = {
    "conditioner.embedders.1.": FamilyName.SDXL,
    "cond_stage_model.model.": FamilyName.SD21,
    "cond_stage_model.transformer.": FamilyName.SD15,
}
"""What the keys of the text encoder that only one family has begin with."""


def is_pickle(name: str) -> bool:
    """Return whether a file's name is one of those that hold pickles."""
    return name.lower().endswith(_PICKLES)


def stem_of(name: str) -> str | None:
    """Return a file's name without `SUFFIX`, in whatever case it is written; None: it has another."""
    return name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else None


def family_of_keys(keys: Iterable[str]) -> FamilyName | None:
    """Return the family of a whole checkpoint by the names of its tensors; None if it is none that plait reads."""
    names = list(keys)

    def has(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in names)

    if not (has(UNET) and has(VAE)):
        return None
    return next((family for prefix, family in _TEXTS.items() if has(prefix)), None)
