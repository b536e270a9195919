"""The ControlNet runner against diffusers' own forward."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import ControlNetModel

from plait_serving.diffusion.controlnet.sessions import batch_key
from plait_serving.diffusion.errors import EngineError, ModelError, OutOfMemory
from plait_serving.diffusion.families.rows import in_groups
from plait_serving.diffusion.families.unet import controlnet
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.protocols import ControlCall, Residuals
from support import controlnet as kit
from support.closeness import EQUAL


@pytest.fixture
def sd(tiny_sd_controlnets: tuple[Path, Path]) -> Path:
    """A tiny ControlNet for SD 1.x."""
    return tiny_sd_controlnets[0]


@pytest.fixture
def runner(sd: Path) -> ControlNetModelRunner:
    """It, loaded."""
    return load_controlnet(sd, dtype=torch.float32)


def _rows(runner: ControlNetModelRunner, asks: list[kit.ControlCase]) -> list[ControlCall]:
    return [
        ControlCall(
            session=runner.open(image=a.image, conditioning=a.conditioning, width=kit.SIZE, height=kit.SIZE),
            sample=a.sample,
            timestep=a.timestep,
            scale=a.scale,
        )
        for a in asks
    ]


def _mixed(width: int, added: int = 0) -> list[kit.ControlCase]:
    return [
        kit.make_ask(1, width=width, n=1, scale=0.7, step=981, added=added),
        kit.make_ask(2, width=width, n=3, scale=1.0, step=3, added=added),
        kit.make_ask(3, width=width, n=2, cfg=True, scale=-0.25, step=500, added=added),
    ]


def test_sdxl_batch_is_forward_times_scale_bit_for_bit(tiny_sdxl_controlnets: tuple[Path, Path]) -> None:
    """With SDXL's pooled text and time ids what `contract/test_controlnet_client` has of Stable Diffusion."""
    asks = _mixed(64, added=32)
    sdxl = tiny_sdxl_controlnets[0]
    runner = load_controlnet(sdxl, dtype=torch.float32)
    answers = runner.residuals(_rows(runner, asks))
    expected = kit.twin_answers(kit.load_twin(sdxl), asks)
    assert all(kit.same_bits(answer, wanted) for answer, wanted in zip(answers, expected, strict=True))


def test_one_exact_block_makes_a_batch_exact(runner: ControlNetModelRunner, sd: Path) -> None:
    """An adopted program computes where nobody asks for exact bits."""
    asks = _mixed(32)
    runner.adopt(kit.LooseProgram(runner))
    first, *others = _rows(runner, asks)
    mixed = runner.residuals([first, *(replace(rows, exact=False) for rows in others)])
    expected = kit.twin_answers(kit.load_twin(sd), asks)
    assert all(kit.same_bits(answer, wanted) for answer, wanted in zip(mixed, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_as_a_tensor_round_like_scales_as_numbers(sd: Path, dtype: torch.dtype) -> None:
    """In half precision a batch of mixed scales gives the bits of one scale at a time."""
    runner = load_controlnet(sd, dtype=dtype)
    a, b = (kit.make_ask(7, width=32, scale=scale) for scale in (0.3, 0.9))
    together = runner.residuals(_rows(runner, [a, b]))
    for i, scale in enumerate((0.3, 0.9)):
        blocks = [
            ControlCall(session=r.session, sample=r.sample, timestep=r.timestep, scale=scale)
            for r in _rows(runner, [a, b])
        ]
        assert kit.same_bits(together[i], runner.residuals(blocks)[i])


def test_bgr_channel_order(sd: Path) -> None:
    """A ControlNet trained on BGR images sees the channels flipped, its embedding does not."""
    model = load_controlnet(sd, dtype=torch.float32).model
    model.register_to_config(controlnet_conditioning_channel_order="bgr")
    ask = kit.make_ask(5, width=32)
    runner = ControlNetModelRunner(model)
    twin = kit.load_twin(sd)
    twin.register_to_config(controlnet_conditioning_channel_order="bgr")
    assert kit.same_bits(runner.residuals(_rows(runner, [ask]))[0], kit.twin_answers(twin, [ask])[0])
    assert model.config.controlnet_conditioning_channel_order == "bgr"


def test_a_missing_folder_and_broken_weights_are_refused(sd: Path, tmp_path: Path) -> None:
    """ModelErrors that say so (`security/test_models` has pickles)."""
    with pytest.raises(ModelError, match="no such folder"):
        load_controlnet(tmp_path / "nothing", dtype=torch.float32)
    broken = shutil.copytree(sd, tmp_path / "broken")
    (broken / "diffusion_pytorch_model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="broken"):
        load_controlnet(broken, dtype=torch.float32)


def test_one_block_that_fails_fails_alone(runner: ControlNetModelRunner) -> None:
    """`try_residuals`: blocks of unequal shapes are split, and the bad one gets its own error."""
    good, bad, longer = _rows(runner, [kit.make_ask(i, width=32) for i in range(3)])
    wrong = ControlCall(session=bad.session, sample=bad.sample[:1], timestep=bad.timestep, scale=1.0)
    wide = ControlCall(
        session=longer.session, sample=longer.sample.repeat(1, 1, 2, 1), timestep=longer.timestep, scale=1.0
    )
    sizes = in_groups([good, wrong, wide, good], batch_key, lambda group: [len(group)] * len(group))
    assert sizes == [3, 3, 1, 3]
    answers = runner.try_residuals([good, wrong, wide, good])
    assert [type(answer) for answer in answers] == [Residuals, ModelError, ModelError, Residuals]
    assert "not the same family" in str(answers[2])


def test_batch_that_does_not_fit_is_halved(sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory: the batch is halved until it fits; one request that does not fit alone is told so. Each time what
    graphs have is given up."""
    room, given_up = 2, list[bool]()
    monkeypatch.setattr(controlnet, "give_back", lambda _, short: given_up.append(short))

    class Small(ControlNetModelRunner):
        def residuals(self, blocks: list[ControlCall]) -> list[Residuals]:
            if len(blocks) > room:
                raise torch.OutOfMemoryError("full")
            return super().residuals(blocks)

    runner = Small(load_controlnet(sd, dtype=torch.float32).model)
    blocks = _rows(runner, [kit.make_ask(i, width=32) for i in range(5)])
    alone = [runner.residuals([block])[0] for block in blocks]
    for answer, wanted in zip(runner.try_residuals(blocks), alone, strict=True):
        assert kit.ulps(answer, wanted) <= EQUAL
    room = 0
    given_up.clear()
    assert all(isinstance(answer, OutOfMemory) for answer in runner.try_residuals(blocks[:2]))
    assert given_up == [True] * 3


def test_a_lost_device_is_no_answer(runner: ControlNetModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the service's thread, and so its replica."""

    def lost(_: list[ControlCall]) -> list[Residuals]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    blocks = _rows(runner, [kit.make_ask(i, width=32) for i in range(2)])
    monkeypatch.setattr(runner, "residuals", lost)
    with pytest.raises(RuntimeError, match="device-side assert"):
        runner.try_residuals(blocks)


def test_a_bug_becomes_an_engine_error(runner: ControlNetModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a forward raises comes back as an EngineError that names it."""
    blocks = _rows(runner, [kit.make_ask(1, width=32)])

    def broken(_: object) -> list[Residuals]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(runner, "residuals", broken)
    answer = runner.try_residuals(blocks)[0]
    assert isinstance(answer, EngineError)
    assert "ZeroDivisionError: oops" in answer.message


def test_the_model_itself_is_left_whole(sd: Path) -> None:
    """The runner's shallow copy shares weights and changes nothing in the model that it was given."""
    model = ControlNetModel.from_pretrained(sd, local_files_only=True)
    before = type(model.controlnet_cond_embedding)
    ControlNetModelRunner(model)
    assert type(model.controlnet_cond_embedding) is before
