"""The contract of a family of image models and of its denoiser. A new family is one more entry of `MODELS`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fakes.blocks import PIPELINE, ROW, blocks_folder
from plait_serving.diffusion.admission import ImageLimits, check_request
from plait_serving.diffusion.errors import ModelError, NumericalError, RequestError
from plait_serving.diffusion.families import FAMILIES, family_row
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.lora.key_formats import LoraFormat, format_of
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.protocols import Conditioning, Denoiser, StepCall
from plait_serving.diffusion.request_fields import request_fields
from plait_serving.diffusion.values import ImageRequest, LoraRef, PromptSyntax, Scheduler
from support.closeness import IN_COMPANY, ulps
from support.families import opened
from support.tiny import tiny_sd, tiny_sdxl
from support.tiny_flow import tiny_flux, tiny_sd3

MODELS = {
    "sd1": tiny_sd,
    "sdxl": tiny_sdxl,
    "sd3": tiny_sd3,
    "flux1-dev": tiny_flux,
    "flux1-schnell": partial(tiny_flux, guidance=False),
    "flux1-kontext": partial(tiny_flux, kontext=True),
    "made-up": blocks_folder,
}
EDGE = 32
GIVEN: dict[str, Any] = {
    "guidance_scale": 4.5, "guidance_rescale": 0.5, "true_cfg_scale": 2.0, "clip_skip": 1, "max_sequence_length": 12,
    "negative_prompt": "a dog", "prompt_syntax": PromptSyntax.A1111, "prompt_2": "x", "negative_prompt_2": "x",
    "original_size": (64, 64), "target_size": (64, 64), "crop": (1, 1),
}  # fmt: skip
"""A value of each field that only some models have a use for."""


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of each family, small and random."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, PIPELINE, ROW)
        yield MODELS[request.param](tmp_path_factory.mktemp("family") / request.param)


@pytest.fixture(scope="module")
def family(folder: Path) -> Family:
    return opened(folder)


@pytest.fixture(scope="module")
def denoiser(family: Family) -> Denoiser:
    return family.load()


def asked(family: Family, **more: Any) -> ImageRequest:
    """A small request with the model's own defaults."""
    fields: dict[str, Any] = {
        "request_id": "r", "prompt": "a red cat", "width": EDGE, "height": EDGE, "steps": 3, "seed": 5,
        "guidance_scale": family.terms.guidance_scale, "scheduler": family.terms.samplers.default, **more,
    }  # fmt: skip
    return ImageRequest(**fields)


def guided(family: Family, **more: Any) -> ImageRequest:
    """One that the model guides by a second row, if it knows any such way."""
    takes = family.terms.takes
    if "true_cfg_scale" in takes:
        more = {"true_cfg_scale": 3.0, "negative_prompt": "a dog", **more}
    elif "guidance_scale" in takes:
        more = {"guidance_scale": 3.0, **more}
    return asked(family, **more)


def plain(family: Family, **more: Any) -> ImageRequest:
    """One without a second row."""
    is_cfg = "guidance_scale" in family.terms.takes and "true_cfg_scale" not in family.terms.takes
    return asked(family, **({"guidance_scale": 1.0} if is_cfg else {}), **more)


def encoded(denoiser: Denoiser, request: ImageRequest) -> Conditioning:
    encoding = denoiser.begin(request)
    for left in range(encoding.calls_left, 0, -1):
        assert encoding.calls_left == left
        found = encoding.advance()
        assert (found is None) is (left > 1)
    assert found is not None
    return found


def call_of(denoiser: Denoiser, request: ImageRequest, *, step: int = 0, **more: Any) -> StepCall:
    """A request's part of a call, of noise."""
    sampler = denoiser.sampler(request, request.seeds)
    return StepCall(
        request=request, conditioning=encoded(denoiser, request), sample=sampler.scale_input(sampler.init_latents(), 0),
        timestep=sampler.timesteps[step], controls=(), **more,
    )  # fmt: skip


def predicted(denoiser: Denoiser, calls: Sequence[StepCall]) -> list[torch.Tensor]:
    found = denoiser.predict(calls)
    assert all(isinstance(each, torch.Tensor) for each in found)
    return [each.clone() for each in found if isinstance(each, torch.Tensor)]


def test_what_it_is_is_told_without_its_code(folder: Path, family: Family) -> None:
    """Its kind, and where the model that steps is; what LoRAs change has the names of folders."""
    row = family_row(folder)
    assert row.kind(folder) == family.kind
    assert row.denoiser == family.lora_targets.denoiser
    assert {ref.component for ref in family.lora_targets.parameters} <= set(family.parts)
    assert {part.files.folder for part in family.parts.values()} == {folder / name for name in family.parts}


def test_a_folder_that_lacks_its_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """With the name of what is missing."""
    harmed = shutil.copytree(folder, tmp_path / "harmed")
    denoiser = family_row(harmed).denoiser
    for file in (harmed / denoiser).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=denoiser):
        opened(harmed).load()


def test_it_says_which_fields_it_takes(family: Family) -> None:
    """Of those that only some models have a use for; others are refused by their names. It takes its own defaults."""
    only_some = {name: each for name, each in request_fields(ImageRequest).items() if each.only_some}
    assert set(GIVEN) == set(only_some)
    terms = family.terms
    assert terms.takes <= set(only_some)
    assert terms.samplers.default in terms.samplers.among
    assert set(terms.samplers.spaced) <= set(terms.samplers.among)
    check = partial(check_request, limits=ImageLimits(), loras=(), controlnets=(), terms=terms)
    check(asked(family))
    check(asked(family, negative_prompt=""))
    family.measure(asked(family, negative_prompt=""))
    for name, declared in only_some.items():
        if name in terms.takes:
            check(asked(family, **{name: GIVEN[name]}))
        else:
            with pytest.raises(RequestError) as refused:
                check(asked(family, **{name: GIVEN[name]}))
            assert refused.value.param == declared.name


def test_a_request_comes_to_what_its_calls_have(family: Family, denoiser: Denoiser) -> None:
    """As many rows as its texts have branches, with and without guidance; its texts are encoded call by call."""
    for request in (plain(family), guided(family)):
        size, found = family.measure(request), encoded(denoiser, request)
        assert found.branches == size.rows * size.row.branches
        assert all(value.shape[0] == found.branches for value in found.added.values())
        assert found.n == request.n
        assert size.words["prompt"] > 0


def test_what_agrees_in_shape_is_what_can_share_a_call(family: Family) -> None:
    """Seeds, steps and words do not matter; the size does, and larger rows are more work."""
    size = family.measure(asked(family))
    for more in ({"seed": 9}, {"steps": 7}, {"prompt": "two cats"}, {"n": 3}):
        assert family.measure(asked(family, **more)).shape == size.shape
    wide, tall = (family.measure(asked(family, width=width, height=height)) for width, height in ((64, 32), (32, 64)))
    assert len({size.shape, wide.shape, tall.shape}) == 3
    assert wide.row.work > size.row.work


def test_its_samplers_make_as_many_calls_as_are_forecast(family: Family, denoiser: Denoiser) -> None:
    """Each from its seeds alone; a preview changes nothing."""
    for kind in family.terms.samplers.among:
        request = asked(family, scheduler=kind, n=2, steps=4)
        ours, twin, other = (denoiser.sampler(request, seeds) for seeds in ((1, 2), (1, 2), (1, 3)))
        latents = ours.init_latents()
        assert len(latents) == 2
        assert torch.equal(latents, twin.init_latents())
        unlike = other.init_latents()
        assert torch.equal(latents[0], unlike[0])
        assert not torch.equal(latents[1], unlike[1])
        assert len(ours.timesteps) == request.calls
        for step in range(request.calls):
            output, before = 0.1 * latents, latents.clone()
            assert ours.predicted_original(output, step, latents).shape == latents.shape
            assert torch.equal(latents, before)
            latents = ours.step(output, step, before.clone())
            assert torch.equal(latents, twin.step(output, step, before))
            assert torch.isfinite(latents).all()


def test_rows_do_not_see_each_other(family: Family, denoiser: Denoiser) -> None:
    """Requests that agree in shape are predicted together as alone, in any order, whatever their steps, words, numbers
    of images and guidance."""
    requests = [guided(family), guided(family, seed=7, n=2, prompt="two dogs"), plain(family, seed=9)]
    first = family.measure(requests[0]).shape
    alike = [request for request in requests if family.measure(request).shape == first]
    assert len(alike) >= 2
    calls = [call_of(denoiser, request, step=i) for i, request in enumerate(alike)]
    alone = [predicted(denoiser, [call])[0] for call in calls]
    assert [len(output) for output in alone] == [request.n for request in alike]
    together = predicted(denoiser, calls)
    backwards = predicted(denoiser, calls[::-1])[::-1]
    for i, output in enumerate(alone):
        assert ulps(together[i], output) <= IN_COMPANY
        assert ulps(backwards[i], output) <= IN_COMPANY
        assert not torch.equal(output[:1], alone[i - 1][:1])


def test_a_row_that_turns_nan_fails_alone(family: Family, denoiser: Denoiser) -> None:
    """The others get what they get without it."""
    good, bad = (call_of(denoiser, asked(family, seed=seed)) for seed in (1, 2))
    found = denoiser.predict([replace(bad, sample=torch.full_like(bad.sample, torch.nan)), good])
    assert isinstance(found[0], NumericalError)
    assert isinstance(found[1], torch.Tensor)
    assert ulps(found[1], predicted(denoiser, [good])[0]) <= IN_COMPANY


def lora_of(family: Family, path: Path, *, is_text: bool) -> LoadedLora:
    """A LoRA of three layers of the model that steps, or of its text encoders, by PEFT's rules."""
    targets, tensors = family.lora_targets, {}
    generator = torch.Generator().manual_seed(3)
    names = {ref: name for name, ref in targets.names.items() if format_of(name) is LoraFormat.PEFT}
    wanted = [
        ref
        for ref, shape in targets.shapes.items()
        if ref in names and len(shape) == 2 and (ref.component != targets.denoiser) is is_text
        if "embed" not in ref.module
    ]
    for ref in wanted[:: max(1, len(wanted) // 3)]:
        rows, columns = targets.shapes[ref]
        tensors[f"{names[ref]}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
        tensors[f"{names[ref]}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    save_file(tensors, path)
    return parse("it", path, targets)


def test_a_lora_acts_as_an_input_or_in_the_weights(family: Family, denoiser: Denoiser, tmp_path: Path) -> None:
    """Alike, where both can be; and the weights come back bit for bit."""
    lora, call = lora_of(family, tmp_path / "it.safetensors", is_text=False), call_of(denoiser, asked(family))
    assert not lora.touches_text_encoder
    (bare,) = predicted(denoiser, [call])
    denoiser.merger.switch((LoraRef(name="it", scale=0.1, file=lora.token),), {"it": lora})
    (merged,) = predicted(denoiser, [replace(call, merged=True)])
    denoiser.merger.switch((), {})
    assert not torch.equal(bare, merged)
    assert torch.equal(bare, predicted(denoiser, [call])[0])
    if denoiser.takes([lora]):
        (as_input,) = predicted(denoiser, [replace(call, loras=((lora, 0.1),))])
        assert ulps(as_input, merged) <= IN_COMPANY


def test_a_lora_of_the_text_changes_what_is_encoded(family: Family, denoiser: Denoiser, tmp_path: Path) -> None:
    """While it is in the weights, and no longer."""
    lora, request = lora_of(family, tmp_path / "it.safetensors", is_text=True), asked(family)
    assert lora.touches_text_encoder

    def text() -> list[torch.Tensor]:
        found = encoded(denoiser, request)
        return [found.text, *found.added.values()]

    bare = text()
    denoiser.text_merger.switch((LoraRef(name="it", scale=0.5, file=lora.token),), {"it": lora})
    changed = text()
    denoiser.text_merger.switch((), {})
    assert not all(map(torch.equal, bare, changed))
    assert all(map(torch.equal, bare, text()))


def test_images_become_latents_and_latents_images(family: Family, denoiser: Denoiser) -> None:
    """Of the size that was asked for, each on its own."""
    shape = denoiser.sampler(asked(family, width=2 * EDGE, height=EDGE), (1,)).init_latents().shape[1:]
    found = denoiser.encode(torch.rand(1, 3, EDGE, 2 * EDGE) * 2 - 1)
    assert found.sample(torch.zeros(1, *shape)).shape == (1, *shape)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    images = denoiser.finish(latents)
    assert (images.shape, images.dtype) == ((2, 3, EDGE, 2 * EDGE), torch.float32)
    assert (float(images.min()) >= 0.0, float(images.max()) <= 1.0) == (True, True)
    assert ulps(denoiser.finish(latents[1:])[0], images[1]) <= IN_COMPANY


def test_it_comes_back_as_it_left(folder: Path, family: Family) -> None:
    """Weights that leave memory and are loaded again predict the same."""
    other = opened(folder)
    request = asked(family, scheduler=Scheduler.EULER)
    (first,) = predicted(loaded := other.load(), [call_of(loaded, request)])
    other.leave()
    (second,) = predicted(loaded := other.load(), [call_of(loaded, request)])
    assert torch.equal(first, second)
