"""Prompts: diffusers' embeddings bit for bit where they fit, chunks where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

from plait_serving.diffusion.admission import ImageLimits, check_prompts
from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.unet.prompt import PromptEncoder, word_ids
from plait_serving.diffusion.values import PromptSyntax
from support.bundles import load_bundle, texts_of
from support.denoise import make_request, prepared

LONG = "apple " * 80
"""80 tokens with the toy tokenizer: two chunks."""


@pytest.fixture(scope="module", params=["sd", "sdxl"])
def case(request):
    """A bundle, its encoder and the stock pipeline of the same folder."""
    folder = request.getfixturevalue(f"tiny_{request.param}_folder")
    kind = StableDiffusionXLPipeline if request.param == "sdxl" else StableDiffusionPipeline
    bundle = load_bundle(folder)
    return bundle, PromptEncoder(bundle), kind.from_pretrained(folder)


def reference(pipeline, prompt: str, negative: str | None, **more) -> tuple[torch.Tensor, torch.Tensor | None]:
    """diffusers' text and pooled rows, unconditional first."""
    if not hasattr(pipeline.text_encoder, "text_model"):  # diffusers asks for the level that transformers 5 dropped
        object.__setattr__(pipeline.text_encoder, "text_model", pipeline.text_encoder)
    with torch.no_grad():
        found = pipeline.encode_prompt(
            prompt, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True, negative_prompt=negative,
            **more,
        )  # fmt: skip
    pooled = torch.cat([found[3], found[2]]) if len(found) == 4 else None
    return torch.cat([found[1], found[0]]), pooled


@pytest.mark.parametrize("negative", [None, "", "a blue dog"])
@pytest.mark.parametrize("prompt", ["", "a red apple, photo", "apple " * 75])
def test_prompts_that_fit_have_diffusers_bits(case, prompt, negative):
    """Empty, short and exactly full prompts; without a negative prompt SDXL's unconditional rows are zeros, with an
    empty one they are its encoding (finding 11)."""
    _, encoder, pipeline = case
    ours = prepared(encoder, make_request(prompt=prompt, negative_prompt=negative))
    text, pooled = reference(pipeline, prompt, negative)
    assert torch.equal(ours.text, text)
    assert ours.branches == 2
    if pooled is not None:
        assert torch.equal(ours.added["text_embeds"], pooled)


@pytest.mark.parametrize("negative", [None, "", "a cat"])
@pytest.mark.parametrize("prompt", ["", "a cat"])
def test_only_the_prompt_skips_layers(case, prompt, negative):
    """diffusers' rule, also where the two are one text; with A1111's syntax, and its rule, the negative prompt skips as
    many, as it does in diffusers where it is the prompt."""
    _, encoder, pipeline = case
    asked = make_request(prompt=prompt, negative_prompt=negative, clip_skip=1)
    text, _ = reference(pipeline, prompt, negative, clip_skip=1)
    assert torch.equal(prepared(encoder, asked).text, text)
    both = prepared(encoder, replace(asked, prompt_syntax=PromptSyntax.A1111)).text
    assert torch.equal(both[1], text[1])
    is_zero = negative is None and not text[0].any()  # SDXL's rule for none
    skipped, _ = reference(pipeline, negative or "", "", clip_skip=1)
    assert torch.equal(both[0], text[0] if is_zero else skipped[1])
    assert is_zero or not torch.equal(both[0], text[0])


def test_long_prompts_are_chunked_not_cut(case):
    """80 words make two chunks: each is what its part alone gives, and the second matters."""
    _, encoder, pipeline = case
    ours = prepared(encoder, make_request(prompt=LONG, negative_prompt="dog"))
    assert ours.text.shape[1] == 154
    first, pooled = reference(pipeline, "apple " * 75, "dog")
    second, _ = reference(pipeline, "apple " * 5, "")
    assert torch.equal(ours.text[:, :77], first)
    assert torch.equal(ours.text[1, 77:], second[1])
    assert torch.equal(ours.text[0, 77:], second[0]), "the negative prompt is filled up with an empty chunk"
    if pooled is not None:
        assert torch.equal(ours.added["text_embeds"], pooled), "pooled text comes from the first chunk"
    other = prepared(encoder, make_request(prompt=LONG + "cat", negative_prompt="dog"))
    assert not torch.equal(other.text, ours.text)


def test_a_long_negative_prompt_lengthens_the_prompt(case):
    """Both branches have as many chunks as the longer of the two."""
    _, encoder, _ = case
    ours = prepared(encoder, make_request(prompt="cat", negative_prompt=LONG + LONG))
    assert ours.text.shape[:2] == (2, 3 * 77)


@pytest.fixture
def calls(case):
    """The calls of text encoders from now on."""
    made = []
    hooks = [each.register_forward_hook(lambda *call: made.append(call)) for each in texts_of(case[0])]
    yield made
    for hook in hooks:
        hook.remove()


def test_the_newest_chunks_are_remembered(case, calls):
    """So many bytes of what text encoders made."""
    bundle, encoder, _ = case
    encoders = len(texts_of(bundle))
    asked = [make_request(prompt=f"cat {i}", guidance_scale=1.0) for i in range(400 // encoders)]
    for one in asked:
        prepared(encoder, one)
    made = len(calls)
    for one in asked[:-20:-1]:
        prepared(encoder, one)
    assert len(calls) == made
    prepared(encoder, asked[0])
    assert len(calls) == made + encoders


def test_a_long_prompt_is_encoded_a_call_at_a_time(case):
    """Finding 2: each chunk is a call of its own, equal chunks are one, and the whole is what `prepare` gives."""
    bundle, encoder, _ = case
    asked = make_request(prompt=LONG + "a cat", negative_prompt="dog")
    encoding = encoder.begin(asked)
    encoders = len(texts_of(bundle))
    assert encoding.calls_left == 4 * encoders  # two chunks of the prompt, "dog" and an empty one
    for _ in range(4 * encoders - 1):
        assert encoding.advance() is None
    assert torch.equal(encoding.advance().text, prepared(encoder, asked).text)
    assert encoder.begin(make_request(prompt="", negative_prompt=LONG)).calls_left == 3 * encoders


def test_prompts_are_measured_in_words(case):
    """Begin, end and padding do not count; an end token inside a prompt is a word of it."""
    bundle, encoder, _ = case
    end = bundle.tokenizers["text_encoder"].eos_token
    size = encoder.size(make_request(prompt=LONG, negative_prompt=f"dog {end} dog"))
    dogs = len(word_ids(bundle.tokenizers["text_encoder"], [f"dog {end} dog"])[0])
    assert (size.words["prompt"], size.words["negative_prompt"], size.chunks) == (80, dogs, 4)
    assert encoder.size(make_request(prompt=LONG, guidance_scale=1.0)).chunks == 2


@pytest.mark.parametrize("field", ["prompt", "prompt_2", "negative_prompt", "negative_prompt_2"])
def test_a_text_that_is_too_long_is_named(case, field):
    """It has as many words as it has, whatever the other encoder's text; no other field is blamed."""
    _, encoder, _ = case
    size = encoder.size(make_request(**{"prompt": "cat", field: LONG}))
    with pytest.raises(RequestError, match="80 tokens") as refused:
        check_prompts(size, ImageLimits(max_prompt_tokens=79))
    assert refused.value.param == field
