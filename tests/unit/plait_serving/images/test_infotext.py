"""The text that images carry, read back the way that A1111 reads it."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_serving.diffusion.values import (
    ControlRef,
    LoraPolicy,
    LoraRef,
    PromptSyntax,
    Scheduler,
    Sigmas,
)
from plait_serving.images.infotext import infotext
from support import engine
from support.names import ODD_NAMES

# stable-diffusion-webui, modules/infotext_utils.py: how it takes the last line apart.
PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


request = partial(
    engine.request, prompt="red apple", width=64, height=48, steps=20, guidance_scale=7.5, seed=41,
    scheduler=Scheduler.DPMPP_2M, n=3,
)  # fmt: skip


def parse(text):
    """Prompt lines, negative prompt lines and pairs, by A1111's rules."""
    *lines, last = text.strip().split("\n")
    pairs = {key: json.loads(value) if value.startswith('"') else value for key, value in PAIR.findall(last)}
    prompt, negative = [], None
    for line in lines:
        if line.startswith("Negative prompt:"):
            negative = [line.removeprefix("Negative prompt:").strip()]
        elif negative is None:
            prompt.append(line)
        else:
            negative.append(line)
    return "\n".join(prompt), "\n".join(negative or []), pairs


def test_everything_that_makes_the_picture_is_there():
    """Prompt, negative prompt, LoRAs in A1111's syntax, and the numbers of this very image."""
    asked = request(
        negative_prompt="blue, green", loras=(LoraRef(name="noto", scale=0.8), LoraRef(name="sketch", scale=-1.0))
    )
    prompt, negative, pairs = parse(infotext(asked, model="emoji", index=2))
    assert prompt == "red apple <lora:noto:0.8> <lora:sketch:-1>"
    assert negative == "blue, green"
    assert pairs == {
        "Steps": "20", "Sampler": "DPM++ 2M", "CFG scale": "7.5", "Seed": "43", "Size": "64x48", "Model": "emoji",
    }  # fmt: skip


def test_controlnets_and_the_policy_are_told():
    """A ControlNet's pair is quoted because it holds commas; k of bounded_async is told."""
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    control = ControlRef(name="edges", image=image, scale=0.5, start=0.0, end=0.75)
    asked = request(controlnets=(control,), lora_policy=LoraPolicy.BOUNDED_ASYNC, lora_free_steps=4)
    _, _, pairs = parse(infotext(asked, model="emoji", index=0))
    assert pairs["ControlNet 0"] == "Module: none, Model: edges, Weight: 0.5, Guidance Start: 0, Guidance End: 0.75"
    assert pairs["Lora free steps"] == "4"


def test_what_else_decides_the_picture_is_there():
    """The options of samplers in A1111's words; what is left at its default is left out."""
    asked = request(scheduler=Scheduler.DDIM, eta=0.5, guidance_rescale=0.7, clip_skip=1)
    _, _, pairs = parse(infotext(asked, model="emoji", index=0))
    assert (pairs["Eta DDIM"], pairs["CFG rescale"], pairs["Clip skip"]) == ("0.5", "0.7", "2")
    _, _, pairs = parse(infotext(request(sigmas=Sigmas.KARRAS), model="emoji", index=0))
    assert (pairs["Sampler"], pairs["Schedule type"]) == ("DPM++ 2M", "Karras")
    sizes = {"original_size": (1024, 768), "target_size": (8, 16), "crop": (3, 0)}
    asked = request(prompt_syntax=PromptSyntax.A1111, prompt_2="a, b", negative_prompt_2="c", **sizes)
    _, _, more = parse(infotext(asked, model="emoji", index=0))
    assert (more["Prompt syntax"], more["Prompt 2"], more["Negative prompt 2"]) == ("a1111", "a, b", "c")
    assert (more["Original size"], more["Target size"], more["Crop"]) == ("1024x768", "8x16", "3x0")
    assert not {"Eta DDIM", "CFG rescale", "Clip skip"} & pairs.keys()


def test_an_image_that_the_model_reads_is_told():
    """The text cannot hold it, but says that there was one."""
    _, _, pairs = parse(infotext(request(reference=np.zeros((60, 100, 3), np.uint8)), model="kontext", index=0))
    assert pairs["Read image"] == "100x60"


@given(st.floats(-100, 100))
def test_scales_read_back_exactly(scale):
    """A LoRA's scale loses no digit."""
    text = infotext(request(loras=(LoraRef(name="noto", scale=scale),)), model="m", index=0)
    assert float(re.search(r"<lora:noto:([^>]+)>", text)[1]) == scale


def test_a_prompt_of_several_lines_stays_whole():
    """Newlines in prompts are kept."""
    prompt, negative, pairs = parse(infotext(request(prompt="a\nb", negative_prompt="c\nd"), model="m", index=0))
    assert (prompt, negative, pairs["Seed"]) == ("a\nb", "c\nd", "41")


@pytest.mark.parametrize("name", [*ODD_NAMES, '"x"', '"x', "a, b"])
def test_names_of_models_and_loras_read_back(name):
    """Whatever script, and also in quotes."""
    prompt, _, pairs = parse(infotext(request(loras=(LoraRef(name=name, scale=0.5),)), model=name, index=0))
    assert prompt == f"red apple <lora:{name}:0.5>"
    assert pairs["Model"] == name
