"""Text encoders are in memory once for all models with equal ones, are asked once for a text, and may leave."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.encoders import SharedEncoders
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.protocols import Denoiser
from plait_serving.diffusion.values import LoraRef
from support.denoise import make_request, prepared
from support.families import edit_json, opened
from support.text_encoders import SeenEncoders, schnell_of, seen
from support.tiny import tiny_sd
from support.tiny_flow import tiny_flow_lora, tiny_flux, tiny_sd3

T5 = "text_encoder_2"

__all__ = ["seen"]


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux(tmp_path_factory.mktemp("models") / "dev")


@pytest.fixture(scope="module")
def schnell(dev: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schnell_of(dev, tmp_path_factory.mktemp("models") / "schnell")


def text(denoiser: Denoiser, prompt: str, **more: Any) -> torch.Tensor:
    """What a prompt becomes: T5's text, then CLIP's vector."""
    asked = make_request(prompt=prompt, guidance_scale=0.0, max_sequence_length=more.pop("length", 16), **more)
    encoding, found = denoiser.begin(asked), None
    while found is None:
        found = encoding.advance()
    return torch.cat([found.text.flatten(), found.added["pooled"].flatten()])


def alone(folder: Path, prompt: str, **more: Any) -> torch.Tensor:
    return text(opened(folder).load(), prompt, **more)


def test_models_with_equal_text_encoders_hold_one_of_each(dev: Path, schnell: Path, seen: SeenEncoders) -> None:
    """Each gets what it gets alone; the second takes no more memory for them, and both together what one takes."""
    both = SharedEncoders()
    first, second = opened(dev, both), opened(schnell, both)
    whole = first.shared_bytes()
    assert second.shared_bytes() == whole > 0
    denoisers = first.load(), second.load()
    assert first.shared_bytes() + second.shared_bytes() == whole
    texts = [text(each, "a red cat") for each in denoisers]
    assert seen.alive == {"clip": 1, "t5": 1}
    assert seen.calls == {"clip": 1, "t5": 1}
    for found, folder in zip(texts, (dev, schnell), strict=True):
        assert torch.equal(found, alone(folder, "a red cat"))
    second.leave()
    assert (first.shared_bytes(), second.shared_bytes()) == (whole, 0)
    first.leave()
    del denoisers
    assert seen.alive == {}
    assert second.shared_bytes() == whole


def test_so_do_models_of_stable_diffusion(seen: SeenEncoders, tmp_path: Path) -> None:
    """Two UNets with one CLIP: each prompt is encoded once, as either model alone encodes it."""
    folders = [tiny_sd(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    shutil.rmtree(folders[1] / "text_encoder")
    shutil.copytree(folders[0] / "text_encoder", folders[1] / "text_encoder")
    both, asked = SharedEncoders(), make_request(prompt="a red cat", negative_prompt="a dog")
    denoisers = [opened(folder, both).load() for folder in folders]
    texts = [prepared(each, asked).text for each in denoisers]
    assert (seen.alive, seen.calls) == ({"clip": 1}, {"clip": 2})
    for found, folder in zip(texts, folders, strict=True):
        assert torch.equal(found, prepared(opened(folder).load(), asked).text)


@pytest.mark.parametrize("other", ["weights", "configuration"])
def test_text_encoders_that_differ_are_not_shared(
    dev: Path, schnell: Path, seen: SeenEncoders, tmp_path: Path, other: str
) -> None:
    """By one bit of their weights, or by what the configuration says of them."""
    folder = shutil.copytree(schnell, tmp_path / "other")
    if other == "weights":
        file = folder / T5 / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        edit_json(folder / T5 / "config.json", layer_norm_epsilon=1e-2)
    both = SharedEncoders()
    denoisers = [opened(each, both).load() for each in (dev, folder)]
    texts = [text(each, "a red cat") for each in denoisers]
    assert seen.alive == {"clip": 1, "t5": 2}
    assert torch.equal(texts[1], alone(folder, "a red cat"))


def test_what_left_comes_back_for_a_new_text_only(dev: Path, seen: SeenEncoders) -> None:
    """T5 leaves memory, CLIP stays; a text that is remembered does not bring it back, another one does, as it was."""
    encoders = SharedEncoders()
    family = opened(dev, encoders)
    denoiser, whole = family.load(), family.shared_bytes()
    first = text(denoiser, "a red cat")
    encoders.leave()
    assert seen.alive == {"clip": 1}
    assert family.shared_bytes() == whole - family.visiting_bytes == family.shared_bytes(left=True)
    assert torch.equal(text(denoiser, "a red cat"), first)
    assert seen.calls == {"clip": 1, "t5": 1}
    assert torch.equal(text(denoiser, "two dogs"), alone(dev, "two dogs"))
    assert family.shared_bytes() == whole
    assert seen.alive["t5"] == 1


def test_one_that_comes_back_sends_others_away(dev: Path, seen: SeenEncoders, tmp_path: Path) -> None:
    """Where memory was short for both, there is never more than one."""
    both = SharedEncoders()
    families = [opened(folder, both) for folder in (dev, tiny_flux(tmp_path / "other", seed=9))]
    denoisers = [each.load() for each in families]
    both.leave()
    for prompt in ("a cat", "a dog"):
        for denoiser in denoisers:
            text(denoiser, prompt)
            assert seen.alive["t5"] == 1
    assert seen.calls == {"clip": 4, "t5": 4}


def test_it_comes_back_from_a_model_that_is_still_there(
    dev: Path, schnell: Path, seen: SeenEncoders, tmp_path: Path
) -> None:
    """Though the model that brought it has gone, with its folder; with none it is said which folder is missing."""
    folder = shutil.copytree(dev, tmp_path / "gone")
    both = SharedEncoders()
    first, second = opened(folder, both), opened(schnell, both)
    first.load()
    denoiser = second.load()
    text(denoiser, "a red cat")
    assert seen.alive["t5"] == 1
    first.leave()
    shutil.rmtree(folder)
    both.leave()
    assert torch.equal(text(denoiser, "two dogs"), alone(schnell, "two dogs"))
    with pytest.raises(ModelError, match="gone"):
        first.load()
    assert second.shared_bytes() == opened(schnell).shared_bytes()


def test_texts_are_remembered_by_what_makes_them(dev: Path, seen: SeenEncoders) -> None:
    """The words, and the length that T5 fills up to: CLIP does not ask for that."""
    denoiser = opened(dev).load()
    for _ in range(2):
        for prompt, length in (("a red cat", 16), ("a red cat", 24), ("two dogs", 16)):
            text(denoiser, prompt, length=length)
    assert seen.calls == {"clip": 2, "t5": 3}


def test_layers_that_are_left_out_are_part_of_a_text(tmp_path: Path, seen: SeenEncoders) -> None:
    """`clip_skip` asks CLIPs again, and not T5."""
    denoiser = opened(tiny_sd3(tmp_path / "sd3")).load()
    found = [text(denoiser, "a red cat", clip_skip=skip) for skip in (0, 1, 0)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert seen.calls == {"clip": 4, "t5": 1}


def test_each_lora_set_has_its_own_texts(dev: Path, seen: SeenEncoders, tmp_path: Path) -> None:
    """Another file or scale is never answered by what the last one made; the same set is, whatever came between; and
    T5, which no set changes, is asked once."""
    family = opened(dev)
    denoiser = family.load()
    one, two = (_lora(family, dev, tmp_path / f"{name}.safetensors", seed) for name, seed in (("one", 2), ("two", 3)))
    sets = [(), ((one, 1.0),), ((one, 0.5),), ((two, 1.0),), ((two, 1.0), (one, 1.0))]
    found = [_with(denoiser, each) for each in sets]
    assert seen.calls == {"clip": len(sets), "t5": 1}
    for each, expected in zip(sets, found, strict=True):
        assert torch.equal(_with(denoiser, each), expected)
        assert torch.equal(_with(opened(dev).load(), each), expected)
    assert seen.calls == {"clip": 2 * len(sets), "t5": 1 + len(sets)}
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_a_set_is_merged_for_the_model_whose_request_has_it(dev: Path, schnell: Path, tmp_path: Path) -> None:
    """Both read with one CLIP: each still gets what it gets alone, in any order."""
    both = SharedEncoders()
    families = [opened(folder, both) for folder in (dev, schnell)]
    denoisers = [each.load() for each in families]
    loras = [_lora(family, dev, tmp_path / f"{i}.safetensors", 2) for i, family in enumerate(families)]
    for mine, its in ((0, 1), (1, 0)):
        expected = _with(opened((dev, schnell)[mine]).load(), ((loras[mine], 1.0),))
        assert torch.equal(_with(denoisers[mine], ((loras[mine], 1.0),)), expected)
        assert torch.equal(_with(denoisers[its], ()), alone((dev, schnell)[its], "a red cat"))
        assert torch.equal(_with(denoisers[mine], ((loras[mine], 1.0),)), expected)


def _lora(family: Family, folder: Path, path: Path, seed: int) -> LoadedLora:
    tiny_flow_lora(path, folder, seed=seed, text=True, strength=0.8, only="attn")
    return parse(path.stem, path, family.lora_targets)


def _with(denoiser: Denoiser, loras: tuple[tuple[LoadedLora, float], ...]) -> torch.Tensor:
    """A text with a set in the weights, as a step puts it there."""
    target = tuple(LoraRef(name=lora.name, scale=scale, file=lora.token) for lora, scale in loras)
    if target != denoiser.text_merger.current:
        denoiser.text_merger.switch(target, {lora.name: lora for lora, _ in loras})
    return text(denoiser, "a red cat")
