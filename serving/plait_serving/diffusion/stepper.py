"""One step of one batch: live weights, prepared units, one denoiser call, sampler steps. Compute thread only.

Any error of one unit is returned for that unit; the others of the batch continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plait_disagg.request_log import on_behalf_of
from plait_kernels.devices import is_out_of_memory
from plait_kernels.executors.graphs import give_back
from plait_kernels.lora_merge import is_finite
from plait_serving.diffusion.decoding import to_rgb
from plait_serving.diffusion.edits import EditSource, overlaid
from plait_serving.diffusion.errors import EngineError, NumericalError, OutOfMemory
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.protocols import (
    ActiveControl,
    ControlNetClient,
    Denoiser,
    Encoding,
    RequestSampler,
    StepCall,
)
from plait_serving.diffusion.units import Unit
from plait_serving.diffusion.values import Edit, LoraSet, RgbImage

_log = logging.getLogger(__name__)

_CALLS_AT_ONCE = 8
"""An ordinary request's text encoder calls are not cut up, so that what arrives together steps together: SDXL makes 4
for a prompt and a negative prompt of one chunk."""

Outcome = EngineError | torch.Tensor | None
"""The outcome of one unit's step: its error, the x0 estimate if a preview was requested, or None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepper:
    """Runs steps on one denoiser. `controlnets` may gain and lose entries between steps."""

    denoiser: Denoiser
    controlnets: Mapping[str, ControlNetClient]
    clock: Callable[[], float]

    def sets_of(self, unit: Unit) -> tuple[LoraSet, LoraSet]:
        """Return the set, with its files, that must be merged for a unit's next step, and the one that the denoiser
        takes as an input of it: one of the two is empty."""
        weights = _weights_of(unit)
        loras = _with_files(unit.loras, weights)
        return ((), loras) if not loras or self.denoiser.takes(list(weights.values())) else (loras, ())

    def is_row_wise(self, unit: Unit) -> bool:
        """Return whether a unit's set can be an input of its next step beside others."""
        weights = list(_weights_of(unit).values())
        return self.denoiser.takes(weights) or self.denoiser.may_take(weights)

    def make_live(self, target: LoraSet, units: Sequence[Unit]) -> bool:
        """Make `target` live and charge the time to `units`; return whether it switched weights. After `LoraError` the
        old weights stay."""
        if target == self.denoiser.merger.current:
            return False
        started_s = self.clock()
        self.denoiser.merger.switch(target, _weights_of(units[0]) if target else {})
        for unit in units:
            unit.job.spent.merge_s += self.clock() - started_s
        return True

    def prepare(self, unit: Unit, *, until_s: float) -> bool:
        """Encode the prompt and an edit's image, draw the noise and open ControlNet sessions unless that was done with
        these weights; return whether the unit is ready to step.

        Encoding ends at the first text encoder call that ends after `until_s`, to go on with the next `prepare`; few
        calls are made at once. No image is begun after `until_s`. A bounded-asynchronous set that touches the text
        encoder gives the prompt a second encoding at step k: which text a step sees depends on k alone, never on when
        the file arrived.
        """
        started_s, merged_s, ready = self.clock(), 0.0, True
        request = unit.job.request
        if unit.sampler is None:
            seeds = request.seeds[unit.first_image : unit.first_image + unit.images]
            unit.sampler = self.denoiser.sampler(request, seeds)
        if unit.latents is None:
            ready = self._start(unit, unit.sampler, until_s)
        text_changed = unit.encoded_with != unit.loras and _touches_text(_weights_of(unit))
        if ready and unit.encoding is None and (unit.conditioning is None or text_changed):
            unit.close_controls()
            unit.encoding = self.denoiser.begin(request)
            unit.encoded_with = unit.loras
        if ready and unit.encoding is not None:
            merged_s = self._merge_text(unit)
            ready = self._encode(unit, unit.encoding, until_s)
        unit.job.spent.merge_s += merged_s
        unit.job.spent.encode_s += self.clock() - started_s - merged_s
        return ready

    def step(self, units: Sequence[Unit], wants_preview: Callable[[Unit], bool]) -> list[Outcome]:
        """Advance every unit by one step; return outcomes in unit order. Units must be prepared and share a group."""
        with on_behalf_of(lambda: (unit.job.request.request_id for unit in units)):
            outputs = self._predict([self._call(unit) for unit in units])
        return [
            output if isinstance(output, EngineError) else _advance(unit, output, wants_preview)
            for unit, output in zip(units, outputs, strict=True)
        ]

    def stepped(self, units: Sequence[Unit], kind: Hashable, seconds: float) -> None:
        """Tell the ControlNets what a step of these units took."""
        asked = {control.client.name: control.client for unit in units for control in unit.controls}
        for client in asked.values():
            client.stepped((kind, tuple(asked)), seconds)

    def decode(self, latents: torch.Tensor, edit: Edit | None = None) -> tuple[tuple[RgbImage, ...], tuple[bool, ...]]:
        """Decode `(n, c, h, w)` to n images, with the edit's own pixels where it keeps them, and their safety flags.
        From any thread."""
        with torch.inference_mode():
            images = self.denoiser.finish(latents)
            flagged = (False,) * len(images)
            if self.denoiser.safety is not None:
                images, flagged = self.denoiser.safety(images)
            return overlaid(to_rgb(images), flagged, edit), flagged

    def _start(self, unit: Unit, sampler: RequestSampler, until_s: float) -> bool:
        """Make the unit's first latents; return False if there was no time to encode what they are made from."""
        job = unit.job
        if job.source is None:
            job.source = EditSource.of(job.request, inpaints=self.denoiser.inpaints)
        if job.source is None:
            unit.latents = sampler.init_latents()
            return True
        while job.source.to_encode:
            started_s = self.clock()
            if started_s >= until_s:
                return False
            name, pixels = job.source.to_encode.popitem()
            job.source.encoded[name] = self.denoiser.encode(pixels)
            job.spent.source_s += self.clock() - started_s
        unit.latents, unit.blend, unit.extra = job.source.start(sampler)
        return True

    def _encode(self, unit: Unit, encoding: Encoding, until_s: float) -> bool:
        """Encode until `until_s`; if all is encoded, open the ControlNet sessions and return True."""
        at_once = encoding.calls_left <= _CALLS_AT_ONCE
        while True:
            conditioning = encoding.advance()
            if conditioning is not None:
                break
            if not at_once and self.clock() >= until_s:
                return False
        unit.encoding = None
        unit.conditioning = replace(conditioning, n=unit.images)
        self._open_controls(unit)
        return True

    def _merge_text(self, unit: Unit) -> float:
        """Put the unit's set into the text encoders, if it changes them; return the seconds it took."""
        weights = _weights_of(unit)
        target = _with_files(unit.loras, weights) if _touches_text(weights) else ()
        if target == self.denoiser.text_merger.current:
            return 0.0
        started_s = self.clock()
        self.denoiser.text_merger.switch(target, weights)
        return self.clock() - started_s

    def _open_controls(self, unit: Unit) -> None:
        request = unit.job.request
        assert unit.conditioning is not None
        for control in request.controlnets:
            client = self.controlnets[control.name]
            with on_behalf_of(lambda: (request.request_id,)):
                session = client.open(
                    image=control.image, conditioning=unit.conditioning, width=request.width, height=request.height
                )
            unit.controls += (ActiveControl(client=client, session=session, scale=control.scale),)

    def _call(self, unit: Unit) -> StepCall:
        assert unit.sampler is not None
        assert unit.latents is not None
        assert unit.conditioning is not None
        request = unit.job.request
        active = tuple(
            control
            for control, ref in zip(unit.controls, request.controlnets, strict=True)
            if ref.acts_in(unit.step, unit.steps)
        )
        weights = _weights_of(unit)
        merged = bool(self.denoiser.merger.current)
        return StepCall(
            request=request,
            conditioning=unit.conditioning,
            sample=unit.sampler.scale_input(unit.latents, unit.step),
            timestep=unit.sampler.timesteps[unit.step],
            controls=active,
            loras=() if merged else tuple((weights[lora.name], lora.scale) for lora in unit.loras),
            merged=merged,
            extra=unit.extra,
        )

    def _predict(self, calls: list[StepCall]) -> list[torch.Tensor | EngineError]:
        """Make one denoiser call; if the device runs out of memory, two of half the size, and so on."""
        try:
            return self.denoiser.predict(calls)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        give_back(calls[0].sample.device, short=True)
        if len(calls) == 1:
            return [OutOfMemory(f"{calls[0].conditioning.n} image(s) of this size do not fit the device")]
        _log.warning("a denoiser call of %d requests ran out of memory; halving it", len(calls))
        half = len(calls) // 2
        return self._predict(calls[:half]) + self._predict(calls[half:])


def _weights_of(unit: Unit) -> Mapping[str, LoadedLora]:
    lease = unit.job.lease
    return lease.weights if lease is not None else {}


def _with_files(loras: LoraSet, weights: Mapping[str, LoadedLora]) -> LoraSet:
    return tuple(replace(lora, file=weights[lora.name].token) for lora in loras)


def _touches_text(weights: Mapping[str, LoadedLora]) -> bool:
    return any(one.touches_text_encoder for one in weights.values())


def _advance(unit: Unit, output: torch.Tensor, wants_preview: Callable[[Unit], bool]) -> Outcome:
    sampler, latents, request = unit.sampler, unit.latents, unit.job.request
    assert sampler is not None
    assert latents is not None
    preview = sampler.predicted_original(output, unit.step, latents) if wants_preview(unit) else None
    if preview is not None and unit.blend is not None:
        preview = unit.blend.estimate(preview)
    latents = sampler.step(output, unit.step, latents)
    if unit.blend is not None:
        latents = unit.blend.after(latents, unit.step, sampler)
    if not is_finite(latents):
        step = request.steps_after(unit.step) + 1
        return NumericalError(f"the image turned NaN or infinite at step {step} of {request.run_steps}")
    unit.latents = latents
    unit.step += 1
    return preview
