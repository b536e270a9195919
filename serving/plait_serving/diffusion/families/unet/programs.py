"""How prepared programs take a UNet and its VAE over: at once if they exist, between two steps once they do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from plait_kernels.executors import Computation, PreparedProgram
from plait_serving.diffusion.families.preparation import Preparer, behind
from plait_serving.diffusion.families.unet.bundle import map_unet, map_vae
from plait_serving.diffusion.families.unet.compiled import CompiledHalves
from plait_serving.diffusion.families.unet.computations import decoder_computation, encoder_computation, vae_computation
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser


class UNetPrograms:
    """Of one base model's folder. Made before the model is loaded: of what has programs, the weights are mapped."""

    def __init__(self, preparer: Preparer | None, folder: Path) -> None:
        """Open what was prepared before; without `preparer` torch runs everything."""
        self._preparer = preparer
        self._folder = folder
        self._halves: CompiledHalves | None = None
        self._decoder: PreparedProgram | None = None
        if preparer is not None:
            self._halves = _halves(preparer.open, folder / "unet")
            self._decoder = preparer.open(folder / "vae", *_vae(folder / "vae"))

    @property
    def mapped(self) -> frozenset[str]:
        """Which of "unet" and "vae" are to be loaded as the files hold them. A start that was interrupted leaves one of
        them."""
        opened = {"unet": self._halves, "vae": self._decoder}
        return frozenset(part for part, program in opened.items() if program is not None)

    def adopt(self, denoiser: UNetDenoiser, prepared: set[str]) -> None:
        """Hand over what exists, and add its parts to `prepared`. Before the model steps."""
        if self._halves is not None:
            denoiser.adopt(self._halves)
        if self._decoder is not None:
            denoiser.adopt_vae(self._decoder)
        prepared |= self.mapped

    def convert_behind(
        self, between_steps: Callable[[Callable[[], None]], None], denoiser: UNetDenoiser, prepared: set[str]
    ) -> Callable[[], None]:
        """Convert what does not exist, in turn with others that convert; torch serves until then, and gives its memory
        back. Return what stops it: what has not begun then never does. A model that leaves is not kept in memory."""
        preparer, folder, missing = self._preparer, self._folder, {"unet", "vae"} - self.mapped
        if preparer is None or not missing:
            return lambda: None
        denoiser_of = weakref.ref(denoiser)

        def take_over(halves: CompiledHalves | None) -> None:
            if (here := denoiser_of()) is not None and halves is not None:
                here.take_over(halves)
                prepared.add("unet")

        def make() -> None:
            if "unet" in missing and denoiser_of() is not None:
                between_steps(partial(take_over, _halves(preparer.make, folder / "unet")))
            if "vae" in missing and denoiser_of() is not None:
                program = preparer.make(folder / "vae", *_vae(folder / "vae"))
                if (here := denoiser_of()) is not None:
                    here.adopt_vae(program)
                    prepared.add("vae")

        return behind(str(folder), make)


def _halves(
    prepare: Callable[[Path, str, Callable[[], Computation]], PreparedProgram | None], folder: Path
) -> CompiledHalves | None:
    encoder = prepare(folder, "encoder", lambda: encoder_computation(map_unet(folder)))
    decoder = prepare(folder, "decoder", lambda: decoder_computation(map_unet(folder)))
    return None if encoder is None or decoder is None else CompiledHalves(encoder=encoder, decoder=decoder)


def _vae(folder: Path) -> tuple[str, Callable[[], Computation]]:
    """Return what a VAE's decoder is called among the parts, and what makes its computation."""
    return "vae-decoder", lambda: vae_computation(map_vae(folder))
