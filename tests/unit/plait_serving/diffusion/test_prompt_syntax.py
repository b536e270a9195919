"""A1111's marks: how they are read, what they do to embeddings (against a naive twin), and SDXL's second prompts."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from plait_serving.diffusion import prompt_syntax
from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.unet.prompt import Chunk, PromptEncoder, PromptTokens, word_ids
from plait_serving.diffusion.prompt_syntax import Span, hint_of, parse, take_loras
from plait_serving.diffusion.values import PromptSyntax
from support.bundles import load_bundle, texts_of
from support.denoise import make_request, prepared

A1111 = PromptSyntax.A1111


@pytest.fixture(scope="module", params=["sd", "sdxl"])
def case(request):
    """A bundle and its encoder. An untrained norm makes embeddings whose mean is zero, which nothing can keep; trained
    ones have biases."""
    bundle = load_bundle(request.getfixturevalue(f"tiny_{request.param}_folder"))
    for text_encoder in texts_of(bundle):
        getattr(text_encoder, "text_model", text_encoder).final_layer_norm.bias.data.fill_(0.2)
    return bundle, PromptEncoder(bundle)


def spans(text: str) -> list[tuple[str, float]]:
    """Pieces with rounded weights."""
    return [(span.text, round(span.weight, 4)) for span in parse(text, "prompt")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # the first ones are the examples in stable-diffusion-webui's own documentation of its parser
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        (r"\(literal\]", [("(literal]", 1.0)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        ("a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
         [("a ", 1.0), ("house", 1.573), (" ", 1.1), ("on", 1.0), (" a ", 1.1), ("hill", 0.55), (", sun, ", 1.1),
          ("sky", 1.4641), (".", 1.1)]),
    ],
)  # fmt: skip
def test_brackets_weigh(text, expected):
    """Nested, named, escaped and unclosed brackets; `property/test_prompt_marks` has any others."""
    assert spans(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a BREAK b BREAKS", [Span("a ", 1.0), Span(" b BREAKS", 1.0, breaks=True)]),
        ("(a BREAK b:2)", [Span("a ", 2.0), Span(" b", 2.0, breaks=True)]),
        ("a BREAK", [Span("a ", 1.0)]),
        ("(a BREAK) b", [Span("a ", 1.1), Span("", 1.1, breaks=True), Span(" b", 1.0)]),
        ("a ( :2)", [Span("a ", 1.0), Span(" ", 2.0)]),
        ("a BREAK BREAK", [Span("a ", 1.0), Span(" ", 1.0, breaks=True)]),
        ("BREAK a", [Span(" a", 1.0, breaks=True)]),
        ("BREAK", [Span("", 1.0)]),
    ],
)
def test_breaks_cut(text, expected):
    """A word of its own, inside brackets too, and no part of other words; as stable-diffusion-webui does, after the
    last one a chunk is begun only for words."""
    assert parse(text, "prompt") == expected


@pytest.mark.parametrize("param", ["negative_prompt", "prompt_2"])
def test_a_tag_elsewhere_is_told_where_it_belongs(param):
    """It is supported, but not there."""
    with pytest.raises(RequestError, match=r"^'<lora:noto:1>' belongs into prompt") as caught:
        parse("dull <lora:noto:1>", param)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "text", ["[cat:dog:0.5]", "[cat|dog]", "a AND b", "<hypernet:x:1>", "(a:1.2.3)", "(b:101)", "(" * 33, "((a:20):20)",
             "(a:" + "9" * 400 + ")",
             "<Hypernet:x:1>", "<lora::1>", "<lora:a<b:1>", "<LORA:a:1>"],
)  # fmt: skip
def test_marks_without_a_meaning_here_are_refused(text):
    """What A1111 knows besides, weights that are no numbers, and brackets without end name the field."""
    with pytest.raises(RequestError) as caught:
        parse(text, "negative_prompt")
    assert caught.value.param == "negative_prompt"


def test_lora_tags_leave_the_prompt():
    """Names and scales come out; without a scale it is 1; what is no number is refused."""
    assert take_loras("a <lora:noto:0.8> cat<lora:x>", "prompt") == ("a  cat", [("noto", 0.8), ("x", 1.0)])
    assert take_loras("a <LORA:x:1> cat<Lora:Y>", "prompt") == ("a  cat", [("x", 1.0), ("Y", 1.0)])
    with pytest.raises(RequestError, match="no number"):
        take_loras("<lora:noto:much>", "prompt")


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [("a (red:1.2) cat", "(red:1.2)"), ("((red)) cat", "((red))"), ("[red] cat", "[red]"), ("a BREAK b", "BREAK"),
     ("cat <lora:noto:1>", "<lora:noto:1>"), ("cat <LORA:x>", "<LORA:x>"), ("a cat (on a mat)", None),
     ("time: 12:30", None)],
)  # fmt: skip
def test_marks_in_plain_prompts_are_seen(prompt, mark):
    """Only what hardly anybody writes otherwise is worth a hint."""
    assert hint_of(prompt) == mark


def work(text: str) -> int:
    """How many of Python's operations `parse` makes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != prompt_syntax.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parse(text, "prompt")
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("piece", ["(a)", "[a]", "(a:1.1)", "(a", r"\(", "a:", "a|", "[(a:1.2)]", "(a [b) c]"])
def test_the_work_is_linear_in_the_text(piece):
    """Twice the text is twice the work, and a piece within many open brackets is no more than one alone."""
    count = 30 if piece == "(a" else 400
    once, twice = work(piece * (count // 2)), work(piece * count)
    assert twice <= 2.1 * once
    nested = work("(" * 15 + "[" * 15 + piece * count) if piece != "(a" else 0
    assert nested <= 1.2 * twice + work("(" * 15 + "[" * 15)


@pytest.mark.parametrize(
    ("text", "says"),
    [("()" * 1_025, "more than 2,048 brackets"), (")" * 2_049, "more than 2,048 brackets"),
     ("a BREAK " * 301 + "b", "more than 300 times BREAK")],
)  # fmt: skip
def test_marks_are_bounded(text, says):
    """A text of 32,000 characters may be nothing but marks; no prompt has tokens for what these would weigh."""
    with pytest.raises(RequestError, match=says) as caught:
        parse(text, "prompt_2")
    assert caught.value.param == "prompt_2"
    parse(text[: len(text) * 2 // 3], "prompt_2")


def words_of(before=lambda texts: None):
    """A tokenizer of one id a word, which calls `before` with the texts that it reads."""

    def tokenizer(texts, **_):
        before(texts)
        return SimpleNamespace(input_ids=[list(range(len(text.split()))) for text in texts])

    vars(tokenizer).update(model_max_length=77, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    return tokenizer


def test_a_tokenizer_is_called_once_for_all_pieces_of_a_text():
    """A call costs as much as a hundred words, and meanwhile no other prompt of the model is read."""
    calls = []
    tokenizer = words_of(calls.append)
    found = PromptTokens((tokenizer, tokenizer)).of("a(bb)[ccc](dddd:1.5)" * 100, A1111)
    assert found.words == 400
    assert [len(texts) for texts in calls] == [400, 400]


@pytest.mark.parametrize("syntax", [PromptSyntax.PLAIN, A1111])
@pytest.mark.parametrize(("text", "is_read_whole"), [("x y z " * 5000, False), ("word " * 5000, True)])
def test_of_a_text_with_far_too_many_tokens_a_part_is_read(text, is_read_whole, syntax):
    """Four of 32,000 brackets in a request would take an engine a tenth of a second, to be refused then."""
    chars = []
    tokens = PromptTokens((words_of(lambda texts: chars.append(sum(map(len, texts)))),), max_words=750)
    if is_read_whole:
        assert tokens.of(text, syntax, param="prompt_2").words == 5000  # those who know the limit refuse it
        return
    with pytest.raises(RequestError, match="2250 tokens and more; at most 750 are read") as caught:
        tokens.of(text, syntax, param="prompt_2")
    assert caught.value.param == "prompt_2"
    assert chars == [4500]


def test_who_asks_for_known_tokens_waits_for_no_others():
    """A long text takes a tokenizer a tenth of a second, and the compute thread asks for those of each request that it
    begins."""
    running, goes_on = threading.Event(), threading.Event()

    def wait(texts):
        if texts == ["long"]:
            running.set()
            assert goes_on.wait(60)

    tokens = PromptTokens((words_of(wait),))
    known = tokens.of("short")
    other = threading.Thread(target=tokens.of, args=("long",))
    other.start()
    assert running.wait(60)
    asking = threading.Thread(target=lambda: found.append(tokens.of("short")), daemon=True)
    found: list[object] = []
    asking.start()
    asking.join(60)
    goes_on.set()
    other.join()
    assert found == [known]


def naive(bundle, encoder, parts: list[list[tuple[str, float]]]) -> torch.Tensor:
    """The twin: chunks of (text, weight) pieces, each read alone as ids, scaled in float64 and brought to its mean."""
    rows = []
    for index, tokenizer in enumerate(bundle.tokenizers.values()):
        chunks = []
        for part in parts:
            words = [(word, weight) for text, weight in part for word in word_ids(tokenizer, [text])[0]]
            assert len(words) <= 75
            padding = 75 - len(words)
            ids = [tokenizer.bos_token_id, *(word for word, _ in words), tokenizer.eos_token_id]
            call = encoder.call(index, Chunk((*ids, *[tokenizer.pad_token_id] * padding)), 0)
            hidden = bundle.encoders.run(call).hidden.double()
            weights = torch.tensor([1.0, *(weight for _, weight in words), 1.0, *[1.0] * padding]).double()
            scaled = hidden * weights[None, :, None]
            chunks.append(scaled * hidden.mean() / scaled.mean())
        rows.append(torch.cat(chunks, dim=1))
    return torch.cat(rows, dim=-1)


def encoded(encoder, prompt: str, **more) -> torch.Tensor:
    """The prompt's own row."""
    return prepared(encoder, make_request(prompt=prompt, guidance_scale=1.0, **more)).text


def test_weights_scale_embeddings_and_keep_their_mean(case):
    """Pieces with weights, and breaks, are the naive twin's; the weights change the text."""
    bundle, encoder = case
    ours = encoded(encoder, "a (red:1.4) [cat] BREAK green apple", prompt_syntax=A1111)
    with torch.no_grad():
        twin = naive(bundle, encoder, [[("a ", 1.0), ("red", 1.4), ("cat", 1 / 1.1)], [("green apple", 1.0)]])
    assert ours.shape[1] == 2 * 77
    assert (ours - twin).abs().max() <= 1e-5 * max(1.0, float(twin.abs().max()))
    assert (ours[:, :77] - encoded(encoder, "a red cat")).abs().max() > 1e-2


def test_without_marks_the_syntax_changes_nothing(case):
    """A prompt without marks has the bits of a plain one; with marks but without the syntax they are plain text."""
    _, encoder = case
    assert torch.equal(encoded(encoder, "a red cat", prompt_syntax=A1111), encoded(encoder, "a red cat"))
    assert not torch.equal(
        encoded(encoder, "a (red:1.4) cat", prompt_syntax=A1111), encoded(encoder, "a (red:1.4) cat")
    )


def test_breaks_count_as_words(case):
    """A thousand breaks are as long a prompt as what is read for them."""
    _, encoder = case
    size = encoder.size(make_request(prompt="a BREAK " * 30, prompt_syntax=A1111, guidance_scale=1.0))
    assert (size.words["prompt"], size.chunks) == (29 * 75 + 1, 30)
