"""`POST /v1/models/NAME/sleep` and `/wake`: who may, and for which names."""

from __future__ import annotations

import pytest

from fakes.images import FakeImageService
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge.auth import ApiKey, Role
from support.http_app import make_client

USER, ADMIN = "user-secret-1234567890", "admin-secret-1234567890"
KEYS = HttpSettings(
    api_keys=(
        ApiKey.from_secret(USER, tenant="a"),
        ApiKey.from_secret(ADMIN, tenant="b", role=Role.ADMIN),
    )
)


@pytest.fixture
def service() -> FakeImageService:
    """It records what sleeps."""
    return FakeImageService()


def test_an_admin_puts_a_model_to_sleep_and_wakes_it(service):
    """The service is told, and the answer says so."""
    client, key = make_client(service, KEYS), {"authorization": f"Bearer {ADMIN}"}
    answer = client.post("/v1/models/emoji/sleep", headers=key)
    assert (answer.status_code, answer.json()) == (200, {"id": "emoji", "object": "model", "asleep": True})
    assert service.asleep == {"emoji"}
    assert client.post("/v1/models/emoji/wake", headers=key).json()["asleep"] is False
    assert service.asleep == set()


@pytest.mark.parametrize("what", ["sleep", "wake"])
def test_nobody_else_may(service, what):
    """A user's key is refused with 403, no key with 401; nothing happens."""
    client = make_client(service, KEYS)
    refused = client.post(f"/v1/models/emoji/{what}", headers={"authorization": f"Bearer {USER}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_required")
    assert client.post(f"/v1/models/emoji/{what}").status_code == 401
    assert service.asleep == set()


def test_a_name_that_is_no_base_model_is_404_with_the_nearest(service):
    """Nothing is passed on."""
    answer = make_client(service).post("/v1/models/emojj/sleep")
    assert answer.status_code == 404
    assert "did you mean emoji" in answer.json()["error"]["message"]
    assert service.asleep == set()
