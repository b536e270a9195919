"""How prepared programs take a base model over from torch: at once if they exist, between two steps once they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait_kernels.executors import PreparedProgram
from plait_serving.diffusion.bundle import Bundle, map_unet, map_vae
from plait_serving.diffusion.denoisers.compiled import CompiledHalves
from plait_serving.diffusion.denoisers.unet import UNetDenoiser
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.preparation import Preparer, behind
from plait_serving.diffusion.residency import ResidentWeights

__all__ = ["Takeover"]


class Takeover:
    """Of one base model's folder. Made before the model is loaded: where the programs exist, its weights are mapped."""

    def __init__(self, preparer: Preparer | None, folder: Path) -> None:
        """Open what was prepared before; without `preparer` torch runs everything."""
        self._preparer = preparer
        self._folder = folder
        self._opened: tuple[CompiledHalves, PreparedProgram] | None = None
        halves = preparer.open_unet(folder / "unet") if preparer is not None else None
        vae = preparer.open_vae(folder / "vae") if preparer is not None and halves is not None else None
        if halves is not None and vae is not None:
            self._opened = halves, vae

    @property
    def mapped(self) -> bool:
        """Whether UNet and VAE are to be loaded as the files hold them."""
        return self._opened is not None

    def unet_weights(self, bundle: Bundle) -> ResidentWeights:
        """Return the keeper of the UNet's weights; what computes the time embedding stays in memory."""
        return ResidentWeights(
            bundle.unet,
            name="the UNet",
            dtype=bundle.dtype,
            mapped=lambda: map_unet(self._folder / "unet"),
            resident=not self.mapped,
            always=("time_embedding", "add_embedding"),
        )

    def vae_weights(self, bundle: Bundle) -> ResidentWeights:
        """Return the keeper of the VAE's weights."""
        return ResidentWeights(
            bundle.vae,
            name="the VAE",
            dtype=bundle.vae_dtype,
            mapped=lambda: map_vae(self._folder / "vae"),
            resident=not self.mapped,
        )

    def adopt(self, denoiser: UNetDenoiser, prepared: set[str]) -> None:
        """Hand over what exists, and add its parts to `prepared`. Before the model steps."""
        if self._opened is not None:
            denoiser.adopt(self._opened[0])
            denoiser.adopt_vae(self._opened[1])
            prepared |= {"unet", "vae"}

    def convert_behind(
        self,
        between_steps: Callable[[Callable[[], None]], None],
        denoiser: UNetDenoiser,
        *,
        merger: Merger,
        weights: ResidentWeights,
        prepared: set[str],
    ) -> None:
        """Convert what does not exist on a background thread; torch serves until then, and gives its memory back."""
        preparer = self._preparer
        if preparer is None or self.mapped:
            return

        def make() -> None:
            halves = preparer.make_unet(self._folder / "unet")

            def adopt() -> None:
                merger.forget()
                denoiser.adopt(halves)
                weights.release()
                prepared.add("unet")

            between_steps(adopt)
            denoiser.adopt_vae(preparer.make_vae(self._folder / "vae"))
            prepared.add("vae")

        behind(str(self._folder), make)
