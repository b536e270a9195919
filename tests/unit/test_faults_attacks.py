"""What attackers send in the runs of `tests/faults` is what it is said to be; and what is promised to their
neighbours."""

from __future__ import annotations

import io
import json
from collections import Counter

import pytest
from PIL import Image

from faults.attacks import ALL, ATTACKS, LORA_SETS
from faults.crowds import UNITS, CrowdReport, crowd_text
from faults.ends import End, Tally
from faults.folders import write_loras
from faults.hostile import PROMPTS, distinct_sizes, large_body, repeated_scans, scans_of, text_chunks
from faults.neighbours import NeighbourReport, NeighbourRound, neighbours_configuration, neighbours_text
from faults.recording import crowd_rows, neighbour_rows
from plait.config import PlaitConfig
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.lora.formats import MAX_FILE_BYTES
from plait_serving.diffusion.lora.layouts import LoraFormat, layout_of
from plait_serving.http.images.schemas import MAX_PROMPT_CHARS, GenerationBody
from plait_serving.images.codec import DecodeLimits


def test_the_last_scan_is_repeated():
    """A JPEG of one grey, which decoders read to the end, with as many scans more as it says."""
    few, many = repeated_scans(edge=64, repeats=0), repeated_scans(edge=64, repeats=50)
    assert len(scans_of(many)) == len(scans_of(few)) + 50 > 55
    with Image.open(io.BytesIO(many)) as image:
        assert (image.mode, image.size, image.info["progressive"]) == ("L", (64, 64), 1)
        assert image.getextrema() == (128, 128)


def test_a_pixel_behind_many_texts():
    """A whole PNG with as many text chunks as it says; the one that is sent is within the limit of an image's bytes."""
    png = text_chunks(count=100)
    assert png.count(b"tEXt") == 100
    with Image.open(io.BytesIO(png)) as image:
        assert (image.mode, image.size, image.getextrema()) == ("L", (1, 1), (0, 0))
    assert len(text_chunks()) < DecodeLimits().max_bytes


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_are_as_long_as_the_api_takes(prompt):
    """Their form is valid: what they mean is left to the parsers."""
    assert len(prompt) == MAX_PROMPT_CHARS
    assert GenerationBody(prompt=prompt, negative_prompt=prompt, prompt_syntax="a1111").prompt == prompt


def test_sizes_are_distinct_and_small_ones_come_first():
    """Two thousand, of multiples of what the model takes."""
    sizes = [tuple(map(int, size.split("x"))) for size in distinct_sizes(16)]
    assert len(set(sizes)) == len(sizes) == 46 * 46
    assert all(width % 16 == height % 16 == 0 for width, height in sizes)
    areas = [width * height for width, height in sizes]
    assert areas == sorted(areas)


def test_a_body_is_as_long_as_it_says():
    """A request's JSON, to the byte."""
    body = large_body(1000)
    assert len(body) == 1000
    assert len(json.loads(body)["controlnets"][0]["image"]) > 900


def test_the_cache_has_room_for_one_set(tmp_path):
    """Seven LoRAs for each of three attackers and one for the neighbour, whole files; a budget of seven to the byte."""
    config = json.loads(neighbours_configuration(tmp_path))
    PlaitConfig.model_validate(config)
    assert [len(names) for names in LORA_SETS] == [7, 7, 7]
    files = {path.stem: path for path in tmp_path.iterdir()}
    assert len(files) == 3 * 7 + 1
    assert {name for names in LORA_SETS for name in names} < set(files)
    for names in LORA_SETS:
        assert sum(files[name].stat().st_size for name in names) == config["images"]["knobs"]["host_lora_bytes"]
    assert len({path.read_bytes() for path in files.values()}) == len(files)
    assert layout_of(inspect(files["neighbour"], max_bytes=MAX_FILE_BYTES).tensors) == LoraFormat.PEFT.value


def test_loras_of_one_rank_have_one_size(tmp_path):
    """Their number is what a budget counts."""
    nbytes = write_loras(tmp_path, ["a", "b"], rank=1)
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {nbytes}


def neighbours(attack, *, ratio=1.0, health_s=0.1, wrong=0, again_s=1.0, grown_mib=0, killed=0):
    """A report of two rounds; alone, images take 1 s."""

    def ends(wrong):
        return Tally(ends=Counter({End.RIGHT: 50 - wrong, End.WRONG: wrong}))

    held = {"engine": 1 << 30, "ingress": 1 << 28}
    alone = NeighbourRound(p50_s=0.5, p95_s=1.0, health_p99_s=0.01, ends=ends(0), peak_bytes=held)
    beside = NeighbourRound(p50_s=0.6, p95_s=ratio, health_p99_s=health_s, ends=ends(wrong), peak_bytes=held)
    return NeighbourReport(
        attack=attack,
        capacity_per_s=5.0,
        offered_per_s=1.5,
        alone=(alone, alone),
        beside=(beside, beside),
        again_s=(again_s, again_s),
        before_bytes=held,
        killed=killed,
        after_bytes={**held, "engine": held["engine"] + (grown_mib << 20)},
    )


@pytest.mark.parametrize(("attack", "limit"), [("decode", 1.5), ("lora", 3.0), ("all", 2.0)])
def test_what_is_promised_to_neighbours_is_a_threshold(attack, limit):
    """The latency beside each attack, `/health` within 0.2 s, every image right, 300 MiB for sizes: more is missed."""
    assert attack in (*ATTACKS, ALL)
    assert neighbours(attack, ratio=limit).misses == []
    missed = {
        f"more than {limit:g}": {"ratio": limit + 0.1},
        "/health": {"health_s": 0.21},
        "49 of 50": {"wrong": 1},
        "as before": {"again_s": None},
        "1 processes": {"killed": 1},
    }
    for words, what in missed.items():
        report = neighbours(attack, **what)
        assert any(words in miss for miss in report.misses)
        assert words in neighbours_text(report)
    assert neighbours("sizes", grown_mib=300).misses == neighbours(attack, grown_mib=301).misses == []
    assert "301 MiB" in neighbours("sizes", grown_mib=301).misses[0]
    assert json.dumps(neighbours(attack).to_json())


def test_rows_of_attacks_and_crowds_are_recorded():
    """What was measured of each side, and the ratio of the neighbour's latencies."""
    values = {"few": {name: [1.0] for name in UNITS}, "many": {name: [2.0, 3.0] for name in UNITS}}
    crowd = CrowdReport(name="files", few="few", many="many", values=values, misses=["a miss"])
    assert "MISSED: a miss" in crowd_text(crowd)
    assert {row.key for row in crowd_rows(crowd)} == {("many-files", side, name) for side in values for name in UNITS}
    ratio = neighbour_rows(neighbours("parse", ratio=1.2))[-1]
    assert ratio.key == ("neighbours-parse", "beside/alone", "latency_p95_s")
    assert ratio.value == pytest.approx(1.2)
