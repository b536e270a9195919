"""What steps of a batch have in common is what they would compute anew."""

from __future__ import annotations

import torch

from plait_serving.diffusion.denoisers.batch import BatchLayout, stack_conditionings, stack_timesteps
from plait_serving.diffusion.denoisers.unet import StepConstants
from plait_serving.diffusion.protocols import Conditioning, StepCall


def call(number: int, timestep: float, *, n: int = 1) -> StepCall:
    """A request's part of a step, with a text of its own."""
    text = torch.full((2, 5, 3), float(number))
    text[1] += 0.5
    conditioning = Conditioning(text=text, added={}, n=n, uses_cfg=True)
    sample = torch.zeros(n, 4, 8, 8)
    return StepCall(
        conditioning=conditioning, sample=sample, timestep=torch.tensor(timestep), guidance_scale=3.0, controls=()
    )


def embed(timesteps: torch.Tensor) -> torch.Tensor:
    """An embedding that tells its timestep."""
    return torch.stack([timesteps, -timesteps], dim=1)


def layout_of(calls: list[StepCall]) -> BatchLayout:
    """Their layout."""
    return BatchLayout.of([one.conditioning for one in calls])


def test_texts_are_stacked_once_for_a_batch_and_anew_for_another():
    """The same requests in the same order share a tensor; fewer, more, or others do not."""
    constants = StepConstants()
    a, b, c = call(1, 0), call(2, 0, n=2), call(3, 0)
    for calls in ([a, b], [a, b], [b, a], [a], [a, b, c], [a, c]):
        layout = layout_of(calls)
        wanted = stack_conditionings([one.conditioning.text for one in calls], layout)
        found = constants.text(calls, layout)
        assert torch.equal(found, wanted)
        assert constants.text(calls, layout) is found


def test_embeddings_are_those_of_each_row_and_are_computed_once():
    """Requests at several timesteps, with several images, in both branches."""
    constants, computed = StepConstants(), []

    def compute(timestep: torch.Tensor) -> torch.Tensor:
        computed.append(float(timestep))
        return embed(timestep)

    calls = [call(1, 7.0), call(2, 3.5, n=2), call(3, 7.0)]
    for _ in range(2):
        found = constants.embedding(calls, layout_of(calls), compute)
        assert torch.equal(found, embed(stack_timesteps(calls, layout_of(calls))))
    assert computed == [7.0, 3.5]


def test_embeddings_are_kept_within_bounds():
    """The one that was not used for longest goes."""
    constants, computed = StepConstants(kept_rows=2), []

    def compute(timestep: torch.Tensor) -> torch.Tensor:
        computed.append(float(timestep))
        return embed(timestep)

    for timestep in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):
        calls = [call(1, timestep)]
        assert torch.equal(constants.embedding(calls, layout_of(calls), compute)[0], embed(calls[0].timestep[None])[0])
    assert computed == [1.0, 2.0, 3.0, 2.0]
