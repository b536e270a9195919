"""How prepared programs take a UNet and its VAE over: at once if they exist, between two steps once they do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from plait_kernels.executors import PreparedProgram
from plait_serving.diffusion.families.encoders import Parts, WeightedPart
from plait_serving.diffusion.families.preparation import Compute, Preparer, behind
from plait_serving.diffusion.families.unet.compiled import CompiledHalves
from plait_serving.diffusion.families.unet.computations import decoder_computation, encoder_computation, vae_computation
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser

_Prepare: TypeAlias = Callable[[WeightedPart, str, Compute], PreparedProgram | None]

_VAE = "vae-decoder"


class UNetPrograms:
    """Of one base model's parts. Made before the model is loaded: of what has programs, the weights are mapped."""

    def __init__(self, preparer: Preparer | None, parts: Parts) -> None:
        """Open what was prepared before; without `preparer` torch runs everything."""
        self._preparer = preparer
        self._unet, self._vae = parts["unet"], parts["vae"]
        self._halves: CompiledHalves | None = None
        self._decoder: PreparedProgram | None = None
        if preparer is not None:
            self._halves = _halves(preparer.open, self._unet)
            self._decoder = preparer.open(self._vae, _VAE, vae_computation)

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
        preparer, unet, vae, missing = self._preparer, self._unet, self._vae, {"unet", "vae"} - self.mapped
        if preparer is None or not missing:
            return lambda: None
        denoiser_of = weakref.ref(denoiser)

        def take_over(halves: CompiledHalves | None) -> None:
            if (here := denoiser_of()) is not None and halves is not None:
                here.take_over(halves)
                prepared.add("unet")

        def make() -> None:
            if "unet" in missing and denoiser_of() is not None:
                between_steps(partial(take_over, _halves(preparer.make, unet)))
            if "vae" in missing and denoiser_of() is not None:
                program = preparer.make(vae, _VAE, vae_computation)
                if (here := denoiser_of()) is not None:
                    here.adopt_vae(program)
                    prepared.add("vae")

        return behind(str(unet.files.folder.parent), make)


def _halves(prepare: _Prepare, unet: WeightedPart) -> CompiledHalves | None:
    encoder = prepare(unet, "encoder", encoder_computation)
    decoder = prepare(unet, "decoder", decoder_computation)
    return None if encoder is None or decoder is None else CompiledHalves(encoder=encoder, decoder=decoder)
