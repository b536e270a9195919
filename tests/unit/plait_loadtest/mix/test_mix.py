"""Requests: what their bodies say, that they are a function of scenario and index, and that shares are as written."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from plait_loadtest.errors import ScenarioError
from plait_loadtest.load import load_scenario
from plait_loadtest.mix import RequestMix
from plait_loadtest.mix.control_images import mask_image
from plait_loadtest.mix.infer import InferRequests
from plait_loadtest.seeds import Numbered, Stream
from plait_serving.http.images.schemas import EditBody, GenerationBody

STYLED = {
    "name": "styled",
    "prompts": ["a", "b"],
    "size": {"64x64": 1, "96x32": 1},
    "steps": {4: 1, 8: 3},
    "images": {1: 1, 2: 1},
    "guidance_scale": 4.5,
    "scheduler": "euler",
    "deadline_ms": 5000,
    "loras": {"count": {0: 1, 2: 1}, "names": ["x", "y", "花 (z)"], "scale": 0.5},
    "controlnets": {"count": {0: 1, 3: 1}, "popularity": {"e": 3, "f": 1, "g": 1, "h": 0}},
}
TABLES = {"rows": [10, 1000, 3], "ids_per_table": [1, 4, 2], "candidates": {2: 1, 5: 1}, "dense": 3}


def mix_of(mix, seed=0, **target):
    """The mix of classes given as mappings, and its scenario."""
    scenario = load_scenario({"target": target, "mix": mix, "seed": seed}, {})
    return RequestMix(scenario), scenario


def infer_mix(**settings):
    return mix_of([TABLES | settings], api="infer", model="m")[0]


def body_of(mix, index):
    return json.loads(mix.build(index).body)


class TestImages:
    def test_a_body_has_the_fields_of_the_api(self):
        """plait's own schema takes every body, and every field that the scenario gives is there."""
        mix, _ = mix_of([STYLED], model="emoji")
        seen = set()
        for index in range(200):
            request = mix.build(index)
            assert (request.method, request.path) == ("POST", "/v1/images/generations")
            assert dict(request.headers)["content-type"] == "application/json"
            body = GenerationBody.model_validate_json(request.body)
            assert (body.guidance_scale, body.scheduler, body.deadline_ms, body.model) == (4.5, "euler", 5000, "emoji")
            loras, controlnets = body.loras or [], body.controlnets or []
            assert len({lora.name for lora in loras}) == len(loras) in (0, 2)
            assert len({net.name for net in controlnets}) == len(controlnets) in (0, 3)
            assert all(lora.scale == 0.5 for lora in loras)
            seen.add((body.prompt, body.size, body.num_inference_steps, body.n))
        assert len(seen) == 16, "each combination of two prompts, sizes, steps and numbers"

    def test_what_is_not_given_is_not_sent(self):
        """Fields that other servers may not know stay away unless the scenario names them."""
        mix, _ = mix_of([{}])
        assert set(body_of(mix, 0)) == {"prompt", "n", "num_inference_steps", "seed"}
        mix, _ = mix_of([{"stream": True, "extra": {"priority": 3, "user": "me", "partial_images": 2}}], path="/x")
        assert body_of(mix, 0).items() >= {"priority": 3, "stream": True, "user": "me", "partial_images": 2}.items()
        assert mix.build(0).path == "/x"
        assert ("accept", "text/event-stream") in mix.build(0).headers

    def test_control_pictures_differ_and_have_the_size_asked_for(self):
        """Each ControlNet of each request gets an image of its own, drawn at the size of the output."""
        mix, _ = mix_of([STYLED | {"controlnets": {"count": {2: 1}, "names": ["e", "f"]}}])
        images = set()
        for index in range(20):
            body = body_of(mix, index)
            for net in body["controlnets"]:
                with Image.open(io.BytesIO(base64.b64decode(net["image"], validate=True))) as image:
                    assert "{}x{}".format(*image.size) == body["size"]
                    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 16)}
                assert {(0, 0, 0), (255, 255, 255)} <= colours or body["size"] != "64x64"
                images.add(net["image"])
        assert len(images) == 40

    def test_some_requests_start_from_an_image(self):
        """Shares are as written, images and masks have the size of the output, and plait's own schema takes them."""
        edits = {"share": 0.5, "masked": 0.25, "strength": 0.6}
        mix, _ = mix_of([STYLED | {"edits": edits, "deadline_ms": None}])
        bodies = [(mix.build(index), body_of(mix, index)) for index in range(400)]
        chosen = [(request, body) for request, body in bodies if request.path == "/v1/images/edits"]
        masked = [body for _, body in chosen if "mask" in body]
        assert (len(chosen), len(masked)) == pytest.approx((200, 50), rel=0.3)
        assert len({body["image"] for _, body in chosen}) == len(chosen)
        for request, body in chosen[:40]:
            assert EditBody.model_validate_json(request.body).strength == 0.6
            for name in {"image", "mask"} & body.keys():
                with Image.open(io.BytesIO(base64.b64decode(body[name]))) as image:
                    assert "{}x{}".format(*image.size) == body["size"]
        assert all("image" not in body for request, body in bodies if request.path != "/v1/images/edits")

    def test_pictures_can_come_from_files(self, tmp_path):
        """Those of ControlNets are taken in turn, unchanged. Each image that is edited goes with its own mask; without
        one for each the scenario is refused."""
        for name in "abmn":
            (tmp_path / name).write_bytes(name.encode())
        images, masks = ([str(tmp_path / name) for name in names] for names in ("ab", "mn"))
        nets = {"count": {1: 1}, "names": ["e"], "images": images}
        edits = {"share": 1, "masked": 1, "path": "/edit", "images": images, "masks": masks}
        mix, _ = mix_of([{"controlnets": nets, "edits": edits}])
        bodies = [body_of(mix, index) for index in range(3)]
        texts = [(body["image"], body["mask"], body["controlnets"][0]["image"]) for body in bodies]
        found = [tuple(base64.b64decode(text) for text in each) for each in texts]
        assert found == [(b"a", b"m", b"a"), (b"b", b"n", b"b"), (b"a", b"m", b"a")]
        assert mix.build(0).path == "/edit"
        with pytest.raises(ScenarioError, match=r"mix\.0\.edits\.masks: 1 for 2 images"):
            mix_of([{"edits": {"share": 1, "images": images, "masks": masks[:1]}}])
        with pytest.raises(ScenarioError, match=r"mix\.0\.edits\.masks: 0 for 2 images"):
            mix_of([{"edits": {"share": 1, "masked": 0.1, "images": images}}])

    def test_a_new_feature_that_is_not_used_changes_no_request(self):
        """A seed's requests stay as they were: what is not used draws nothing."""
        plain, _ = mix_of([STYLED])
        unused, _ = mix_of([STYLED | {"edits": {"share": 0, "strength": 0.5}, "models": {"emoji": 1}}])
        for index in range(50):
            assert body_of(unused, index) == body_of(plain, index) | {"model": "emoji"}

    def test_a_class_can_have_headers_of_its_own(self):
        """Two tenants are two classes; a header that HTTP does not know is refused."""
        classes = [{"name": name, "headers": {"Authorization": f"Bearer {name}"}} for name in ("a", "b")]
        mix, _ = mix_of(classes)
        for index in range(20):
            tenant = mix.kinds[mix.kind(index)]
            assert ("authorization", f"Bearer {tenant}") in mix.build(index).headers
        with pytest.raises(ScenarioError, match=r"mix\.0\.headers: bad name"):
            mix_of([{"headers": {"a b": "c"}}])
        ranking = infer_mix(headers={"X-Tenant": "a"})
        assert ("x-tenant", "a") in ranking.build(0).headers

    def test_a_mask_is_white_on_black(self):
        """A box of a sixteenth to a quarter of the area, the same for the same number."""
        assert mask_image(3, 64, 32) == mask_image(3, 64, 32) != mask_image(4, 64, 32)
        for number in range(30):
            with Image.open(io.BytesIO(mask_image(number, 64, 32))) as image:
                pixels = np.asarray(image.convert("L"))
            assert pixels.shape == (32, 64)
            assert set(np.unique(pixels)) == {0, 255}
            assert 1 / 20 < (pixels == 255).mean() <= 1 / 4

    def test_prompts_can_come_from_a_file(self, tmp_path):
        """One a line, blank lines skipped; a file without any is an error."""
        path = tmp_path / "p.txt"
        path.write_text("one, with a comma\n\n  zwei äöü \n", encoding="utf-8")
        mix, _ = mix_of([{"prompts_file": str(path)}])
        assert {body_of(mix, index)["prompt"] for index in range(50)} == {"one, with a comma", "zwei äöü"}
        path.write_text("\n\n")
        with pytest.raises(ScenarioError, match=r"p\.txt has no prompt"):
            mix_of([{"prompts_file": str(path)}])

    def test_shares_are_those_of_the_weights(self):
        """Chi-square of steps, of models instead of the target's own, and of the first LoRA (Zipf over the order of
        names), in 4,000 requests."""
        loras = {"count": {1: 1}, "names": ["a", "b", "c"], "zipf": 1}
        spec = {"steps": {10: 1, 20: 2, 30: 5}, "loras": loras, "models": {"emoji": 3, "emoji+noto": 1, "never": 0}}
        mix, _ = mix_of([spec], model="other")
        bodies = [body_of(mix, index) for index in range(4000)]
        models = [sum(body["model"] == name for body in bodies) for name in ("emoji", "emoji+noto")]
        assert stats.chisquare(models, [3000, 1000]).pvalue > 1e-3
        steps = [sum(body["num_inference_steps"] == value for body in bodies) for value in (10, 20, 30)]
        assert stats.chisquare(steps, np.array([1, 2, 5]) / 8 * 4000).pvalue > 1e-3
        loras = [sum(body["loras"][0]["name"] == name for body in bodies) for name in "abc"]
        assert stats.chisquare(loras, np.array([6, 3, 2]) / 11 * 4000).pvalue > 1e-3
        with pytest.raises(ScenarioError, match=r"mix\.0\.models: has no weight above 0"):
            mix_of([{"models": {"one": 0}}])


class TestInfer:
    def test_binary_and_json_carry_the_same_numbers(self):
        """The binary body, read by the protocol's rules, has the tensors of the JSON body."""
        binary, plain = infer_mix(), infer_mix(binary=False)
        for index in range(10):
            request = binary.build(index)
            assert request.path == "/v2/models/m/infer"
            headers = dict(request.headers)
            length = int(headers["inference-header-content-length"])
            head, rest = json.loads(request.body[:length]), request.body[length:]
            inputs = body_of(plain, index)["inputs"]
            for described, expected, dtype in zip(head["inputs"], inputs, ("<f4", "<i8"), strict=True):
                size = described["parameters"]["binary_data_size"]
                tensor, rest = np.frombuffer(rest[:size], dtype), rest[size:]
                assert described["shape"] == expected["shape"]
                assert described["datatype"] == expected["datatype"]
                assert tensor.size == np.prod(described["shape"])
                assert tensor.tolist() == expected["data"]
            assert rest == b""
            assert head["outputs"] == [{"name": "scores", "parameters": {"binary_data": True}}]

    def test_shapes_and_ranges_are_those_of_the_tables(self):
        """C candidates; columns of ids in table order, each below its table's rows; dense numbers in [0, 1)."""
        for index in range(20):
            dense, ids = (entry for entry in body_of(infer_mix(binary=False), index)["inputs"])
            candidates = dense["shape"][0]
            assert candidates in (2, 5)
            assert (dense["shape"], ids["shape"]) == ([candidates, 3], [candidates, 7])
            assert (np.array(ids["data"]).reshape(-1, 7) < [10, 1000, 1000, 1000, 1000, 3, 3]).all()
            assert 0 <= min(dense["data"]) <= max(dense["data"]) < 1

    def test_without_dense_or_outputs_nothing_is_sent_for_them(self):
        """No empty tensor; all outputs are asked for in binary."""
        request = infer_mix(dense=0, outputs=[]).build(0)
        head = json.loads(request.body[: int(dict(request.headers)["inference-header-content-length"])])
        assert [entry["name"] for entry in head["inputs"]] == ["ids"]
        assert head["parameters"] == {"binary_data_output": True}
        assert "outputs" not in head

    def test_candidates_follow_mlperf_by_default(self):
        """Chi-square of 4,000 requests against the quantile table."""
        expected = np.array([2, 12, 2, 1, 1, 1, 1]) / 20 * 4000
        _, chosen = mix_of([{}], api="infer", model="m")
        streams = [Numbered(0, Stream.MIX, 0, which) for which in (0, 1)]
        requests = InferRequests(chosen.mix[0], chosen.target, *streams)
        drawn = [requests.candidates(index) for index in range(4000)]
        counts = [drawn.count(number) for number in range(100, 800, 100)]
        assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_a_mix_knows_what_its_requests_ask_for():
    """The images of a body's `n`, the outputs that are named, at least one; of a plain request nobody can tell."""
    mix, _ = mix_of([STYLED])
    assert {mix.asked(index) for index in range(20)} == {1, 2}
    assert all(mix.asked(index) == body_of(mix, index)["n"] for index in range(20))
    assert (infer_mix(outputs=["a", "b"]).asked(0), infer_mix(outputs=[]).asked(0)) == (2, 1)
    assert mix_of([{}], api="raw")[0].asked(0) == 0


class TestRaw:
    def test_the_index_is_put_where_it_is_asked_for(self):
        """In path and body, each time it stands there."""
        mix, _ = mix_of([{"method": "PUT", "path": "/a/{index}?b={index}", "body": '{"i": {index}}'}], api="raw")
        request = mix.build(37)
        assert (request.method, request.path, request.body) == ("PUT", "/a/37?b=37", b'{"i": 37}')
        assert request.headers == (("content-type", "application/json"),)

    def test_a_constant_request_is_built_once(self):
        """Twenty thousand a second must cost nothing; without a body there is no content type."""
        mix, _ = mix_of([{}], api="raw", path="/health")
        assert mix.build(0) is mix.build(99)
        assert (mix.build(0).method, mix.build(0).path, mix.build(0).headers) == ("GET", "/health", ())

    def test_a_body_can_come_from_a_file(self, tmp_path):
        """Byte by byte."""
        (tmp_path / "b").write_bytes(b"\x00\xff{index}")
        mix, _ = mix_of([{"body_file": str(tmp_path / "b"), "content_type": "x/y"}], api="raw")
        assert mix.build(8).body == b"\x00\xff8"


class TestMix:
    def test_a_request_does_not_depend_on_those_before_it(self):
        """Built backwards, with leaps beyond what is kept: the same bytes."""
        forwards, scenario = mix_of([STYLED, {"name": "plain"}])
        indices = [0, 1, 1023, 1024, 5000, 100_000, 4_000_000_000]
        bodies = {index: forwards.build(index) for index in indices}
        backwards = RequestMix(scenario)
        assert {index: backwards.build(index) for index in reversed(indices)} == bodies

    def test_another_seed_asks_for_something_else(self):
        """The seed reaches kinds, details and tensors."""
        for mix, target in (([STYLED], {}), ([TABLES], {"api": "infer", "model": "m"})):
            one, two = (mix_of(mix, seed=seed, **target)[0] for seed in (1, 2))
            assert [one.build(i).body for i in range(5)] != [two.build(i).body for i in range(5)]

    def test_another_process_builds_the_same_bytes(self):
        """Kinds, times and bodies of a scenario in a fresh interpreter with another hash seed."""
        code = (
            "import hashlib; from plait_loadtest.load import load_scenario; from plait_loadtest.plan import make_plan\n"
            "for name in ('smoke', 'dlrm-server'):\n"
            "    plan = make_plan(load_scenario(name, {'limits.cancel_rate': 0.5}))\n"
            "    digest = hashlib.sha256(plan.scheduled_ns.tobytes() + plan.cancelled.tobytes())\n"
            "    for index in range(10): digest.update(plan.mix.build(index).body)\n"
            "    print(digest.hexdigest())\n"
        )
        run = partial(subprocess.run, [sys.executable, "-c", code], check=True, capture_output=True, text=True)
        runs = [run(env={"PYTHONHASHSEED": seed}).stdout.split() for seed in "12"]
        assert runs[0] == runs[1]
        assert len(set(runs[0])) == 2
