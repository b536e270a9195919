"""Which names a server of a configuration answers to."""

from __future__ import annotations

import hashlib

import pytest
from pydantic import ValidationError

from plait.config import ServerSection
from plait.deployments import http_settings
from plait_serving.http.edge.auth import Principal
from plait_serving.sections import ApiKey, Role

KEY = ApiKey(sha256=hashlib.sha256(b"secret").hexdigest())


@pytest.mark.parametrize(
    ("section", "answered", "refused"),
    [
        (ServerSection(), {"127.0.0.1", "localhost", "[::1]"}, True),
        (ServerSection(host="127.0.0.2"), {"127.0.0.1", "localhost", "[::1]", "127.0.0.2"}, True),
        (ServerSection(host="localhost"), {"127.0.0.1", "localhost", "[::1]"}, True),
        (ServerSection(host="0.0.0.0"), set(), False),
        (ServerSection(api_keys=(KEY,)), set(), False),
        (ServerSection(allowed_hosts=("plait.example",), api_keys=(KEY,)), {"plait.example", "127.0.0.1"}, True),
        (ServerSection(host="10.1.2.3", allowed_hosts=("plait.example",)), {"plait.example", "10.1.2.3"}, True),
        (ServerSection().behind("0.0.0.0"), set(), False),
        (ServerSection().behind("127.0.0.1"), {"127.0.0.1"}, True),
        (ServerSection(allowed_hosts=("plait.example",)).behind("0.0.0.0"), {"plait.example"}, True),
        (ServerSection(allowed_hosts=()), set(), False),
    ],
)
def test_a_web_page_can_not_ask_under_its_own_name(section: ServerSection, answered: set[str], refused: bool) -> None:
    """On loopback without keys a page's domain that points here would else read the answers (DNS rebinding)."""
    hosts = http_settings(section).allowed_hosts
    assert answered <= set(hosts)
    assert bool(hosts) == refused
    assert "evil.example" not in hosts


@pytest.mark.parametrize(
    ("section", "role"),
    [
        (ServerSection(), Role.ADMIN),
        (ServerSection(host="0.0.0.0"), Role.USER),
        (ServerSection(host="gpu7"), Role.USER),
        (ServerSection().behind("0.0.0.0"), Role.USER),
        (ServerSection().behind("10.1.2.3"), Role.USER),
        (ServerSection(allowed_hosts=("plait.example",)).behind("::"), Role.USER),
        (ServerSection().behind("127.0.0.1"), Role.ADMIN),
    ],
)
def test_who_has_no_key_is_an_admin_only_where_nobody_else_reaches_the_server(
    section: ServerSection, role: Role
) -> None:
    """The address that Serve really listens on decides, not the one in the file (finding 8)."""
    assert http_settings(section).anyone == Principal(tenant="default", role=role)
    assert section.is_open is (role is Role.USER)


@pytest.mark.parametrize("name", ["plait.example:8000", "[::1]:8000"])
def test_a_name_has_no_port(name: str) -> None:
    """It would never be met: the port of a Host header is cut off."""
    with pytest.raises(ValidationError, match="has a port; a name is meant"):
        ServerSection(allowed_hosts=(name,))
    assert ServerSection(allowed_hosts=("plait.example", "::1", "[::1]")).allowed_hosts
