"""What `plait serve` says."""

from __future__ import annotations

import pytest

from plait.config import PlaitConfig
from plait.server.supervise import warning_lines

KEYS = [{"sha256": "0" * 64, "tenant": "acme", "role": "admin"}]


NAMING = (
    "plait: any host name is answered to, and URLs of kept images begin with the one that a request says; "
    "images.results.public_url names the server's"
)


@pytest.mark.parametrize(
    ("results", "server", "is_said"),
    [
        ({"folder": "kept"}, {"host": "0.0.0.0", "api_keys": KEYS}, True),
        ({"folder": "kept"}, {"api_keys": KEYS}, True),
        ({"folder": "kept"}, {}, False),
        ({"folder": "kept"}, {"allowed_hosts": ["plait.example"], "api_keys": KEYS}, False),
        ({"folder": "kept", "public_url": "https://plait.example"}, {"api_keys": KEYS}, False),
        (None, {"api_keys": KEYS}, False),
    ],
)
def test_a_server_that_answers_to_any_name_says_what_urls_begin_with(results, server, is_said):
    """Where it keeps images for URLs, and none is configured."""
    config = PlaitConfig.model_validate({"images": {"results": results}, "server": server})
    assert list(warning_lines(config, config.server)) == ([NAMING] if is_said else [])
