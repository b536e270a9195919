"""One step of one batch: live weights, prepared units, one denoiser call, sampler steps. Compute thread only.

Any error of one unit is returned for that unit; the others of the batch continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from plait_disagg.request_log import on_behalf_of
from plait_kernels.device_errors import is_out_of_memory
from plait_kernels.executors.graphs import give_back
from plait_kernels.lora_merge import is_finite
from plait_serving.diffusion.decoding import decoded
from plait_serving.diffusion.edits import Blend, EditSource
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
from plait_serving.diffusion.values import LoraSet, RgbImage

_log = logging.getLogger(__name__)

_CALLS_AT_ONCE = 8
"""An ordinary request's text encoder calls are not cut up, so that what arrives together steps together: SDXL makes 4
for a prompt and a negative prompt of one chunk."""

Outcome = EngineError | torch.Tensor | None
"""The outcome of one unit's step: its error, the x0 estimate if a preview was requested, or None."""


class Stepper:
    """Runs steps on one denoiser. `controlnets` may gain and lose entries between steps."""

    def __init__(
        self,
        *,
        denoiser: Denoiser,
        controlnets: Mapping[str, ControlNetClient],
        clock: Callable[[], float],
    ) -> None:
        self.denoiser = denoiser
        self._controlnets = controlnets
        self._clock = clock

    @property
    def settled(self) -> bool:
        """Whether the last step tells how long such steps take."""
        return self.denoiser.settled

    def to_merge(self, unit: Unit) -> LoraSet:
        """Return the set, with its files, that must be merged for a unit's next step: none if the denoiser takes its
        set as inputs."""
        weights = _weights_of(unit)
        if not unit.loras or self.denoiser.takes(list(weights.values())):
            return ()
        return _with_files(unit.loras, weights)

    def shared(self, unit: Unit) -> LoraSet:
        """Return the set, with its files, that the denoiser takes as an input of a unit's next step."""
        return () if self.to_merge(unit) else _with_files(unit.loras, _weights_of(unit))

    def is_row_wise(self, unit: Unit) -> bool:
        """Return whether a unit's set can be an input of its next step beside others."""
        weights = list(_weights_of(unit).values())
        return self.denoiser.takes(weights) or self.denoiser.may_take(weights)

    def make_live(self, target: LoraSet, units: Sequence[Unit]) -> bool:
        """Make `target` live and charge the time to `units`; return whether it switched weights. After `LoraError` the
        old weights stay."""
        if target == self.denoiser.merger.current:
            return False
        started_s = self._clock()
        self.denoiser.merger.switch(target, _weights_of(units[0]) if target else {})
        for unit in units:
            unit.job.spent.merge_s += self._clock() - started_s
        return True

    def prepare(self, unit: Unit, *, until_s: float) -> bool:
        """Encode the prompt and an edit's image, draw the noise and open ControlNet sessions unless that was done with
        these weights; return whether the unit is ready to step.

        Encoding ends at the first text encoder call that ends after `until_s`, to go on with the next `prepare`; few
        calls are made at once. No image is begun after `until_s`. A bounded-asynchronous set that touches the text
        encoder gives the prompt a second encoding at step k: which text a step sees depends on k alone, never on when
        the file arrived.
        """
        started_s, merged_s, ready = self._clock(), 0.0, True
        request = unit.job.request
        if unit.sampler is None:
            seeds = request.seeds[unit.first_image : unit.first_image + unit.images]
            unit.sampler = self.denoiser.sampler(request, seeds)
        if unit.latents is None:
            ready = self._start(unit, unit.sampler, until_s)
        if ready and unit.encoding is None and (unit.conditioning is None or self._text_changed(unit)):
            unit.close_controls()
            unit.encoding = self.denoiser.begin(request)
            unit.encoded_with = unit.loras
        if ready and unit.encoding is not None:
            merged_s = self._merge_text(unit)
            ready = self._encode(unit, unit.encoding, until_s)
        unit.job.spent.merge_s += merged_s
        unit.job.spent.encode_s += self._clock() - started_s - merged_s
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
            client.stepped((kind, tuple(asked)), seconds if self.settled else None)

    def switch_s(self, target: LoraSet) -> float:
        """Return the seconds that making `target` live is expected to take."""
        return self.denoiser.merger.switch_cost_s(target)

    def decode(self, latents: torch.Tensor) -> tuple[tuple[RgbImage, ...], tuple[bool, ...]]:
        """Decode `(n, c, h, w)` to n images and their safety flags. From any thread."""
        return decoded(self.denoiser, latents)

    def _start(self, unit: Unit, sampler: RequestSampler, until_s: float) -> bool:
        """Make the unit's first latents; return False if there was no time to encode what they are made from."""
        job = unit.job
        if job.source is None:
            job.source = EditSource.of(job.request, inpaints=self.denoiser.inpaints)
        if job.source is None:
            unit.latents = sampler.init_latents()
            return True
        while (pixels := job.source.to_encode) is not None:
            started_s = self._clock()
            if started_s >= until_s:
                return False
            job.source.put(self.denoiser.encode(pixels))
            job.spent.source_s += self._clock() - started_s
        start = job.source.start(sampler)
        unit.latents, unit.blend, unit.extra = start.latents, start.blend, start.extra
        return True

    def _encode(self, unit: Unit, encoding: Encoding, until_s: float) -> bool:
        """Encode until `until_s`; if all is encoded, open the ControlNet sessions and return True."""
        at_once = encoding.calls_left <= _CALLS_AT_ONCE
        while True:
            conditioning = encoding.advance()
            if conditioning is not None:
                break
            if not at_once and self._clock() >= until_s:
                return False
        unit.encoding = None
        unit.conditioning = replace(conditioning, n=unit.images)
        self._open_controls(unit)
        return True

    def _text_changed(self, unit: Unit) -> bool:
        return unit.encoded_with != unit.loras and _touches_text(_weights_of(unit))

    def _merge_text(self, unit: Unit) -> float:
        """Put the unit's set into the text encoders, if it changes them; return the seconds it took."""
        weights = _weights_of(unit)
        target = _with_files(unit.loras, weights) if _touches_text(weights) else ()
        if target == self.denoiser.text_merger.current:
            return 0.0
        started_s = self._clock()
        self.denoiser.text_merger.switch(target, weights)
        return self._clock() - started_s

    def _open_controls(self, unit: Unit) -> None:
        request = unit.job.request
        assert unit.conditioning is not None
        opened: list[ActiveControl] = []
        try:
            for control in request.controlnets:
                client = self._controlnets[control.name]
                with on_behalf_of(lambda: (request.request_id,)):
                    session = client.open(
                        image=control.image, conditioning=unit.conditioning, width=request.width, height=request.height
                    )
                opened.append(ActiveControl(client=client, session=session, scale=control.scale))
        finally:
            unit.controls = tuple(opened)

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
    assert unit.sampler is not None
    assert unit.latents is not None
    preview = unit.sampler.predicted_original(output, unit.step, unit.latents) if wants_preview(unit) else None
    if preview is not None and unit.blend is not None:
        preview = unit.blend.estimate(preview)
    latents = advance(unit.sampler, output, unit.step, unit.latents, unit.blend)
    if latents is None:
        return NumericalError(
            f"the image turned NaN or infinite at step {_step_of(unit)} of {unit.job.request.run_steps}"
        )
    unit.latents = latents
    unit.step += 1
    return preview


def _step_of(unit: Unit) -> int:
    """Return which of the request's steps is being taken, from 1."""
    return unit.step // unit.job.request.scheduler.calls_per_step + 1


def advance(
    sampler: RequestSampler, output: torch.Tensor, step: int, latents: torch.Tensor, blend: Blend | None = None
) -> torch.Tensor | None:
    """Return the latents after a step, or None if they hold NaN or infinity."""
    updated = sampler.step(output, step, latents)
    if blend is not None:
        updated = blend.after(updated, step, sampler)
    return updated if is_finite(updated) else None
