"""`GET /v1/status` and `/v1/words`: what the page tells people of the server and its models."""

from __future__ import annotations

import pytest

from fakes.images import FakeImageService
from plait.app import AppArgs
from plait.deployments import starter_words
from plait_kernels.cores import instruction_set
from plait_serving.health import Health
from plait_serving.http.context import HttpSettings
from plait_serving.images.config import ImagesSection
from plait_serving.replica_metrics import ReplicaMetrics, family
from plait_serving.starter.words import image_words, ranking_words
from support.http_app import make_client

ENGINE = [
    family("plait_engine_replicas", "x", 1),
    family("plait_engine_requests_waiting", "x", 3),
    family("plait_engine_requests_running", "x", 2),
    family("plait_engine_queued_compute_seconds", "x", 1.25),
    family("plait_lora_cache_resident", "x", {("emoji",): 4}, "model"),
    family("plait_lora_cache_resident_bytes", "x", {("emoji",): 1000}, "model"),
    family("plait_model_resident", "x", {("emoji",): 1, ("other",): 0}, "model"),
    family("plait_models_resident_bytes", "x", 5000),
    family("plait_engine_prepared", "x", {("unet",): 1, ("controlnet edges",): 1}, "part"),
]


class Replicas(FakeImageService):
    """Two engine replicas, as far as metrics tell."""

    async def counts(self) -> list[ReplicaMetrics]:
        """Returns what the handle's service returns."""
        name = "plait_host_instruction_set"
        hosts = [family(name, "x", {(isa,): 1}, "name") for isa in ("avx2", "avx512_bf16")]
        return [ReplicaMetrics(replica=f"{number}", families=[*ENGINE, host]) for number, host in enumerate(hosts)]


def test_the_status_sums_over_replicas():
    """What waits and what is resident, of all of them; a program that both have is there once."""
    found = make_client(Replicas()).get("/v1/status").json()
    assert found["replicas"] == {"ingress": 1, "engine": 2}
    assert found["queue"] == {"waiting": 6, "running": 4, "compute_s": 2.5}
    assert found["resident"] == {
        "models": ["emoji"], "model_bytes": 10000, "loras": 8, "lora_bytes": 2000,
        "prepared": ["controlnet edges", "unet"],
    }  # fmt: skip
    assert found["services"] == {"images": True}
    assert found["instruction_sets"] == ["avx2", "avx512_bf16"]  # two hosts that differ
    assert (found["ready"], found["reason"], found["images_made"]) == (True, None, 0)


def test_the_status_counts_images_and_says_what_is_missing():
    """Of a server that is not ready, too: it is for people who wonder why."""
    service = FakeImageService(health=Health(ready=False, reason="the warm-up image is not made yet"))
    client = make_client(service)
    client.post("/v1/images/generations", json={"prompt": "x", "n": 2})
    answer = client.get("/v1/status")
    assert answer.status_code == 200
    assert (answer.json()["ready"], answer.json()["reason"]) == (False, "the warm-up image is not made yet")
    assert answer.json()["images_made"] == 2
    assert answer.json()["instruction_sets"] == [instruction_set()]  # the ingress's, where no engine says one


def test_the_words_of_the_starter_models(client):
    """320 concepts, and the words for the numbers of three inputs, in the order of these numbers."""
    settings = HttpSettings(words={"emoji": image_words(), "picks": ranking_words()})
    emoji, picks = make_client(FakeImageService(), settings).get("/v1/words").json()["data"]
    assert (emoji["id"], len(emoji["concepts"])) == ("emoji", 320)
    assert "red apple" in emoji["concepts"]
    counts = {name: len(words) for name, words in picks["inputs"].items()}
    assert (picks["id"], counts) == ("picks", {"age_band": 7, "liked_genres": 12, "daypart": 4})
    assert client.get("/v1/words").json()["data"] == []


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (AppArgs(), {"emoji", "picks"}),
        (AppArgs(images=ImagesSection(name="little")), {"little", "picks"}),
        (AppArgs(images=ImagesSection(model="/models/sd"), recommend=None), set()),
    ],
)
def test_only_starter_models_have_words(args, names):
    """By the names that requests use; any other model reads any text."""
    assert starter_words(args).keys() == names


def test_a_scheduler_has_the_name_that_images_carry(client):
    """The page reads A1111's names back from a PNG."""
    model = client.get("/v1/models/emoji").json()
    assert model["scheduler_names"].keys() == set(model["schedulers"])
    assert model["scheduler_names"]["dpmpp_2m"] == "DPM++ 2M"
