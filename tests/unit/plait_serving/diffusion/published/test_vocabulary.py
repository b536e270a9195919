"""CLIP's vocabulary: the ids that published text encoders were trained with."""

from __future__ import annotations

import pytest
from transformers import CLIPTokenizer

from plait_serving.diffusion.published.configs import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The files, read by transformers."""
    folder = tmp_path_factory.mktemp("clip") / "tokenizer"
    write_tokenizer(folder, pad_token="<|endoftext|>")
    return CLIPTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # Of the model cards of openai/clip-vit-large-patch14 and of diffusers' documentation.
        ("a photo of a cat", [320, 1125, 539, 320, 2368]),
        ("a photo of a dog", [320, 1125, 539, 320, 1929]),
        ("hello world", [3306, 1002]),
        ("An Astronaut", [550, 18376]),
        ("<|endoftext|>", [49407]),
    ],
)
def test_words_have_their_published_ids(text, ids, tokenizer):
    """Upper case too, between the marks of start and end."""
    assert tokenizer(text).input_ids == [49406, *ids, 49407]
