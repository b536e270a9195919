"""What attackers send is what it is said to be; and what is promised to their neighbours."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from plait.config import PlaitConfig
from plait_bench.benchmark import RATIO, ResultRow
from plait_bench.faults.attacks import (
    ALL,
    ATTACKS,
    KEYS,
    LORA_SETS,
    PROMPTS,
    SCAN,
    repeated_scans,
    text_chunks,
)
from plait_bench.faults.tenants import FirstImage, ManyFiles, ManyModels, Neighbour, Refusals, Share
from plait_loadtest.errors import LoadtestError
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.lora.key_formats import format_of_keys
from plait_serving.diffusion.lora.parse import MAX_FILE_BYTES
from plait_serving.diffusion.request_fields import MAX_PROMPT_CHARS
from plait_serving.http.images.schemas import GenerationBody
from plait_serving.images.codec import MAX_BYTES


def test_the_last_scan_is_repeated():
    """A JPEG of one grey, which decoders read to the end, with as many scans more as it says."""
    few, many = repeated_scans(edge=64, repeats=0), repeated_scans(edge=64, repeats=50)
    assert many.count(SCAN) == few.count(SCAN) + 50 > 55
    with Image.open(io.BytesIO(many)) as image:
        assert (image.mode, image.size, image.info["progressive"]) == ("L", (64, 64), 1)
        assert image.getextrema() == (128, 128)


def test_a_pixel_behind_many_texts():
    """A whole PNG with as many text chunks as it says; the one that is sent is within the limit of an image's bytes."""
    png = text_chunks(count=100)
    assert png.count(b"tEXt") == 100
    with Image.open(io.BytesIO(png)) as image:
        assert (image.mode, image.size, image.getextrema()) == ("L", (1, 1), (0, 0))
    assert len(text_chunks()) < MAX_BYTES


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_are_as_long_as_the_api_takes(prompt):
    """Their form is valid: what they mean is left to the parsers."""
    assert len(prompt) == MAX_PROMPT_CHARS
    assert GenerationBody(prompt=prompt, negative_prompt=prompt, prompt_syntax="a1111").prompt == prompt


def test_the_cache_has_room_for_one_set(tmp_path):
    """Seven LoRAs for each of three attackers and one for the neighbour, whole files; a budget of seven to the byte."""
    config = Neighbour("n", "lora").configuration(tmp_path)
    PlaitConfig.model_validate(config)
    assert [len(names) for names in LORA_SETS] == [7, 7, 7]
    files = {path.stem: path for path in (tmp_path / "loras").iterdir()}
    assert len(files) == 3 * 7 + 1
    assert {name for names in LORA_SETS for name in names} < set(files)
    for names in LORA_SETS:
        assert sum(files[name].stat().st_size for name in names) == config["images"]["knobs"]["host_lora_bytes"]
    assert len({path.read_bytes() for path in files.values()}) == len(files)
    assert isinstance(format_of_keys(inspect(files["neighbour"], max_bytes=MAX_FILE_BYTES).tensors), str)


@pytest.mark.parametrize("workload", [Share("share"), Refusals("refusals", 100, 1.0), ManyModels("m"), ManyFiles("f")])
def test_servers_can_read_their_configuration(workload, tmp_path):
    """And the folders that it names are there."""
    images = PlaitConfig.model_validate(workload.configuration(tmp_path)).images
    assert images is not None
    for folder in (images.models_folder, images.loras.folder):
        assert folder is None or Path(folder).is_dir()


def row(system, metric, *values, unit="s"):
    """A row of a workload."""
    return ResultRow.of(values, system=system, workload="w", metric=metric, unit=unit)


def neighbours(attack, *, ratio=1.0, health_s=0.1, grown_mib=0, killed=0):
    """What is judged of a neighbour beside an attack; alone, images take 1 s."""
    return Neighbour("n", attack).judge(
        [
            row("beside/alone", "latency_p95_s", ratio, unit=RATIO),
            row("beside", "health_p99_s", 0.01, health_s),
            row("beside", "killed", killed, unit="processes"),
            row("alone", "engine_mib", 1000.0, unit="MiB"),
            row("beside", "engine_mib", 1000.0 + grown_mib, unit="MiB"),
        ]
    )


@pytest.mark.parametrize(("attack", "limit"), [("decode", 1.5), ("lora", 3.0), ("all", 2.0)])
def test_what_is_promised_to_neighbours_is_a_threshold(attack, limit):
    """The latency beside each attack, `/health` within 0.2 s in every round, 300 MiB for sizes: more is missed."""
    assert attack in (*ATTACKS, ALL)
    assert neighbours(attack, ratio=limit) == []
    missed = {
        f"more than {limit:g}": {"ratio": limit + 0.1},
        "/health": {"health_s": 0.21},
        "processes": {"killed": 1},
    }
    for words, what in missed.items():
        assert any(words in miss for miss in neighbours(attack, **what))
    assert neighbours("sizes", grown_mib=300) == neighbours(attack, grown_mib=301) == []
    assert "MiB that the engine holds more: 301" in neighbours("sizes", grown_mib=301)[0]


def test_promises_to_tenants_are_thresholds():
    """Nine tenths of the goodput, one request's delay, a second at 100 connections: more is missed."""

    def share(ratio):
        return Share("s").judge([row("beside/alone", "goodput_per_s", ratio, unit=RATIO)])

    def first(beside_s):
        return FirstImage("f").judge([row("alone", "first_image_s", 1.0), row("beside", "first_image_s", beside_s)])

    def refusals(p99_s):
        return Refusals("r", 100, 1.0).judge([row("plait", "refused_p99_s", p99_s)])

    assert share(0.92) == first(1.9) == refusals(0.9) == []
    assert "is lost: 0.20" in share(0.8)[0]
    assert "requests of its kind: 1.50" in first(2.5)[0]
    assert "1.10, more than 1" in refusals(1.1)[0]
    assert refusals(float("inf")) != []  # nothing was refused


def test_a_flood_that_failed_is_told(monkeypatch):
    """What the other tenant got without it would count as its share beside it."""
    share = Share("s")
    share.per_s = 1.0

    def loaded(asks, arrivals, seconds, *, key, **_):
        if key == KEYS["a"]:
            raise LoadtestError("nobody listens")
        return SimpleNamespace(summary=SimpleNamespace(total=SimpleNamespace(goodput_per_s=2.0)))

    monkeypatch.setattr(share, "loaded", loaded)
    monkeypatch.setattr("plait_bench.faults.tenants._RAMP_S", 0.0)
    assert [reading.value for reading in asyncio.run(share.measured("alone", 1))] == [2.0]
    with pytest.raises(LoadtestError, match="nobody listens"):
        asyncio.run(share.measured("beside", 1))


def test_promises_of_many_are_thresholds():
    """A tenth more memory than given, 2 ms for each request, 100 ms for a listing, 2 s until a file is known."""

    def models(engine_mib, killed=0, broken=0):
        values = {"engine_mib": engine_mib, "killed": killed, "broken": broken}
        return ManyModels("m").judge([row("15 models", metric, value) for metric, value in values.items()])

    def files(**many):
        few = dict.fromkeys(ManyFiles.metrics, 1.0)
        systems = {"3 files": few, "3000 files": {**few, **many}}
        return ManyFiles("f").judge([row(name, *each) for name, values in systems.items() for each in values.items()])

    assert models(4500) == files(refusal_ms=3.0, listing_ms=100.0, known_s=2.0) == []
    assert [len(models(4600)), len(models(1, killed=1)), len(models(1, broken=1))] == [1, 1, 1]
    assert [len(files(refusal_ms=3.1)), len(files(listing_ms=101.0)), len(files(known_s=2.1))] == [1, 1, 1]
