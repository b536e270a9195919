"""`POST /v1/models/NAME/sleep` and `/wake`: who may, and for which names."""

from __future__ import annotations

from plait_serving.http.context import HttpSettings
from plait_serving.sections import Role
from support.http_app import make_client
from support.keys import api_key

KEYS = HttpSettings(api_keys=(api_key("user", tenant="a"), api_key("admin", tenant="b", role=Role.ADMIN)))


def test_an_admin_puts_a_model_to_sleep_and_wakes_it(service):
    """The service is told, and the answer says so; a user's key is refused with 403, no key with 401."""
    client, key = make_client(service, KEYS), {"authorization": "Bearer admin"}
    answer = client.post("/v1/models/emoji/sleep", headers=key)
    assert (answer.status_code, answer.json()) == (200, {"id": "emoji", "object": "model", "asleep": True})
    assert service.asleep == {"emoji"}
    refused = client.post("/v1/models/emoji/wake", headers={"authorization": "Bearer user"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_required")
    assert client.post("/v1/models/emoji/wake").status_code == 401
    assert service.asleep == {"emoji"}
    assert client.post("/v1/models/emoji/wake", headers=key).json()["asleep"] is False
    assert service.asleep == set()


def test_a_name_that_is_no_base_model_is_404_with_the_nearest(service, client):
    """Nothing is passed on."""
    answer = client.post("/v1/models/emojj/sleep")
    assert answer.status_code == 404
    assert "did you mean emoji" in answer.json()["error"]["message"]
    assert service.asleep == set()
