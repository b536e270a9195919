"""How prepared programs take a base model over from torch: at once if they exist, between two steps once they do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

from plait_kernels.executors import PreparedProgram
from plait_serving.diffusion.bundle import Bundle, map_unet, map_vae
from plait_serving.diffusion.denoisers.compiled import CompiledHalves
from plait_serving.diffusion.denoisers.unet import UNetDenoiser
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.preparation import Preparer, behind
from plait_serving.diffusion.resident_weights import ResidentWeights


class ProgramSwitch:
    """Of one base model's folder. Made before the model is loaded: of what has programs, the weights are mapped."""

    def __init__(self, preparer: Preparer | None, folder: Path) -> None:
        """Open what was prepared before; without `preparer` torch runs everything."""
        self._preparer = preparer
        self._folder = folder
        self._halves: CompiledHalves | None = None
        self._vae: PreparedProgram | None = None
        if preparer is not None:
            self._halves = preparer.open_unet(folder / "unet")
            self._vae = preparer.open_vae(folder / "vae")

    @property
    def mapped(self) -> frozenset[str]:
        """Which of "unet" and "vae" are to be loaded as the files hold them. A start that was interrupted leaves one of
        them."""
        opened = {"unet": self._halves, "vae": self._vae}
        return frozenset(part for part, program in opened.items() if program is not None)

    def unet_weights(self, bundle: Bundle) -> ResidentWeights:
        """Return the keeper of the UNet's weights; what computes the time embedding stays in memory."""
        return ResidentWeights(
            bundle.unet,
            name="the UNet",
            dtype=bundle.dtype,
            mapped=lambda: map_unet(self._folder / "unet"),
            resident="unet" not in self.mapped,
            always=("time_embedding", "add_embedding"),
        )

    def vae_weights(self, bundle: Bundle) -> ResidentWeights:
        """Return the keeper of the VAE's weights."""
        return ResidentWeights(
            bundle.vae,
            name="the VAE",
            dtype=bundle.vae_dtype,
            mapped=lambda: map_vae(self._folder / "vae"),
            resident="vae" not in self.mapped,
        )

    def adopt(self, denoiser: UNetDenoiser, prepared: set[str]) -> None:
        """Hand over what exists, and add its parts to `prepared`. Before the model steps."""
        if self._halves is not None:
            denoiser.adopt(self._halves)
        if self._vae is not None:
            denoiser.adopt_vae(self._vae)
        prepared |= self.mapped

    def convert_behind(
        self,
        between_steps: Callable[[Callable[[], None]], None],
        denoiser: UNetDenoiser,
        *,
        merger: Merger,
        weights: ResidentWeights,
        prepared: set[str],
    ) -> None:
        """Convert what does not exist on a background thread; torch serves until then, and gives its memory back.

        It takes turns with others that convert: a model that has left meanwhile is not kept in memory for it.
        """
        preparer = self._preparer
        missing = {"unet", "vae"} - self.mapped
        if preparer is None or not missing:
            return

        denoiser_of, merger_of, weights_of = weakref.ref(denoiser), weakref.ref(merger), weakref.ref(weights)

        def make_unet() -> None:
            halves = preparer.make_unet(self._folder / "unet")

            def adopt() -> None:
                here, merger, weights = denoiser_of(), merger_of(), weights_of()
                if here is not None and merger is not None and weights is not None:
                    merger.forget()
                    here.adopt(halves)
                    weights.release()
                    prepared.add("unet")

            between_steps(adopt)

        def make() -> None:
            if "unet" in missing and denoiser_of() is not None:
                make_unet()
            if "vae" in missing and denoiser_of() is not None:
                program = preparer.make_vae(self._folder / "vae")
                if (here := denoiser_of()) is not None:
                    here.adopt_vae(program)
                    prepared.add("vae")

        behind(str(self._folder), make)
