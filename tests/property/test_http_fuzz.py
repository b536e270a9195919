"""Whatever JSON arrives: never a 5xx, always OpenAI's form, and what is accepted is within the limits."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.images import FAKE_CATALOG, FakeImageService
from plait_serving.http.images.schemas import EditBody, GenerationBody
from support.http_app import b64, make_client, png

URL = "/v1/images/generations"
EDITS_URL = "/v1/images/edits"

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-1, 12)
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["", "auto", "16x16", "euler", "png", "exact", "bounded_async", "noto", "edges", "b64_json"])
    | st.sampled_from([-0.0, 1e308, 2**63, 2**64, -1, "\x00", "\ud800", "a" * 40_000])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
lora = st.fixed_dictionaries(
    {},
    optional={"name": st.sampled_from(["noto", "sketch", "nobody"]) | anything, "scale": st.floats(-2, 2) | anything},
)
controlnet = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["edges", "plain"]) | anything,
        "image": st.just(b64(png(8, 8))) | anything,
        "scale": st.floats(0, 2) | anything,
        "start": st.floats(0, 1) | anything,
        "end": st.floats(0, 1) | anything,
        "preprocess": st.booleans() | anything,
    },
)
GOOD = {
    "prompt": st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=30),
    "n": st.integers(1, 10),
    "size": st.sampled_from(["8x8", "16x24", "auto"]),
    "stream": st.booleans(),
    "partial_images": st.integers(0, 3),
    "num_inference_steps": st.integers(1, 6),
    "guidance_scale": st.floats(0, 20),
    "seed": st.integers(-1, 2**63 - 1),
    "scheduler": st.sampled_from(["ddim", "lcm"]),
    "loras": st.lists(lora, max_size=3),
    "controlnets": st.lists(controlnet, max_size=2),
    "lora_policy": st.sampled_from(["exact", "bounded_async"]),
    "lora_free_steps": st.integers(0, 6),
    "deadline_ms": st.integers(1, 10_000),
}
fields = {name: GOOD.get(name, anything) | anything for name in GenerationBody.model_fields}
a_field = st.sampled_from(sorted(fields)).flatmap(lambda name: fields[name].map(lambda value: {name: value}))
# A few fields at a time: with more, one bad value hides what the others would do.
bodies = st.lists(a_field, max_size=3).map(
    lambda parts: {"prompt": "x"} | {k: v for part in parts for k, v in part.items()}
)
edit = st.fixed_dictionaries(
    {"image": st.just(b64(png(16, 8))) | anything},
    optional={
        "mask": st.sampled_from([b64(png(16, 8, (255, 255, 255))), b64(png(8, 8))]) | anything,
        "strength": st.floats(0, 1) | anything,
        "overlay": st.booleans() | anything,
    },
)
nested = [
    f"{field}[{i}][{name}]" for field in ("loras", "controlnets") for i in ("", 0, 1) for name in ("name", "scale")
]
part = st.tuples(
    st.sampled_from([*EditBody.model_fields, *nested, "image[]", "loras[]", "controlnets[0][image]"])
    | st.text(st.characters(exclude_characters='"\\\r\n', exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(
        [b"", b"1", b"0.5", b"-1", b"true", b"null", b"noto", b"[{}]", b'[{"name": "noto"}]', b"[[[", b"1e999"]
    )
    | st.sampled_from([b'"\\ud800"', png(16, 8), b64(png(16, 8)).encode()])
    | st.binary(max_size=20),
    st.booleans(),
)

_service = FakeImageService()
_client = make_client(_service)


def _form(parts: list[tuple[str, bytes, bool]]) -> bytes:
    """The bytes of a form of fields and files."""
    made = b""
    for name, value, is_file in parts:
        file = '; filename="f"' if is_file else ""
        made += f'--B\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value + b"\r\n"
    return made + b"--B--\r\n"


def _check(content: bytes, url: str = URL, kind: str = "application/json") -> int:
    _service.submitted.clear()
    answer = _client.post(url, content=content, headers={"content-type": kind})
    is_late = answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_missed"  # 1 ms is valid
    assert answer.status_code < 500 or is_late, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"]
        assert is_late or _service.submitted == []
        return answer.status_code
    (request,) = _service.submitted
    limits = FAKE_CATALOG.model.limits
    assert request.width * request.height <= limits.max_pixels
    assert request.width % limits.size_multiple == request.height % limits.size_multiple == 0
    assert 1 <= request.steps <= limits.max_steps
    assert 1 <= request.n <= 10
    assert 0 <= request.seed <= request.seeds[-1] < 2**63
    assert all(abs(ref.scale) <= 100 for ref in request.loras)
    assert all(control.image.shape == (request.height, request.width, 3) for control in request.controlnets)
    return answer.status_code


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(bodies | anything)
def test_any_json(value):
    """Known fields with valid values and values of any type, or JSON of any shape: 200, or a 4xx that names the
    trouble."""
    _check(json.dumps(value).encode())


FORM = "multipart/form-data; boundary=B"


@given(st.binary(max_size=300), st.sampled_from([(URL, "application/json"), (EDITS_URL, FORM)]))
def test_any_bytes(content, route):
    """Bytes that are no JSON at all, and no form."""
    assert _check(content, *route) == 400


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(bodies, edit)
def test_any_edit(body, edit):
    """An image, a mask and a strength of any type beside fields of any type."""
    if _check(json.dumps(body | edit).encode(), EDITS_URL) == 200:
        (request,) = _service.submitted
        assert request.edit.image.shape == (request.height, request.width, 3)
        assert 1 <= request.run_steps <= request.steps


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(part, max_size=4), st.booleans(), st.integers(0, 60))
def test_any_form(parts, is_whole, cut):
    """Fields and files of any name and content, and forms that are cut off."""
    ordinary = [("prompt", b"x", False), ("image", png(16, 8), True)]
    content = _form(ordinary + parts)
    _check(content if is_whole else content[: len(content) - cut], EDITS_URL, FORM)
