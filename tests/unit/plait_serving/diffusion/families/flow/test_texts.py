"""Token ids are those of the tokenizers' own calls, as diffusers makes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.flow.texts import TextTokens
from support.tiny import tiny_tokenizer
from support.tiny_flow import tiny_t5_tokenizer

TEXTS = ["", "a red cat", "the house and a tree, with " * 30, "ünïcode ☃ photo", "  two  spaces "]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A CLIP tokenizer with padding of its own and one of T5."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {"clip": tiny_tokenizer(folder / "clip", pad_token="!"), "t5": tiny_t5_tokenizer(folder / "t5")}


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_tokenizers_own(tokenizers, text):
    """Begin, end and padding; CLIP's are cut off at 77, T5's fill up the length that is asked for."""
    tokens = TextTokens(tokenizers)
    clip = tokenizers["clip"](text, padding="max_length", max_length=77, truncation=True).input_ids
    assert list(tokens.clip("clip", text).ids) == clip
    for length in (8, 64, 256):
        t5 = tokenizers["t5"](text, padding="max_length", max_length=length, truncation=True).input_ids
        assert list(tokens.t5("t5", text, length).ids) == t5


def test_a_text_without_room_is_refused_by_its_field(tokenizers):
    """With the number of its words, and what gives more room."""
    tokens = TextTokens(tokenizers)
    assert tokens.check_fits("clip", "a red cat", 3, param="prompt", hint="less") == 3
    with pytest.raises(RequestError, match="3 tokens; this model reads 2 of them: less") as caught:
        tokens.check_fits("clip", "a red cat", 2, param="negative_prompt", hint="less")
    assert caught.value.param == "negative_prompt"


class Watched:
    """A tokenizer, and how long the texts were that it read."""

    def __init__(self, tokenizer):
        self.tokenizer, self.read = tokenizer, []

    def __call__(self, text, **more):
        self.read.append(len(text))
        return self.tokenizer(text, **more)


def test_of_a_text_far_too_long_the_beginning_is_read(tokenizers):
    """Nobody else's text is read meanwhile, and what takes long is refused."""
    watched = Watched(tokenizers["clip"])
    tokens = TextTokens({"clip": watched})
    with pytest.raises(RequestError, match="tokens and more; this model reads 75 of them: less"):
        tokens.check_fits("clip", "(" * 32_000, 75, param="prompt", hint="less")
    assert sum(watched.read) <= 6 * 75
    assert tokens.check_fits("clip", " " * 31_998 + "ab", 75, param="prompt", hint="less") <= 75


@pytest.mark.parametrize(("count", "reads"), [(1_000, 31), (40_000, 32)])
def test_the_words_of_endless_texts_are_soon_forgotten(count, reads):
    """A few hundred of them are a third of a GB, and nobody may have one."""
    watched = Watched(lambda text, **_: SimpleNamespace(input_ids=[7] * (len(text) // 2)))
    tokens = TextTokens({"clip": watched})
    for number in (*range(31), 0):
        tokens.words("clip", "( " * (count + number))
    assert len(watched.read) == reads
