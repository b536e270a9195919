"""What `plait serve` says."""

from __future__ import annotations

import pytest

from plait.config import PlaitConfig
from plait.server.supervise import start_line, warning_lines

KEYS = [{"sha256": "0" * 64, "tenant": "acme", "role": "admin"}]


def test_the_line_that_it_is_ready_lists_what_is_not_loaded():
    """Each with its reason, and not among what is served."""
    refused = {"dream": "/models/dream: no such folder", "ControlNet wide": "made for sdxl, the base model is sd1"}
    assert start_line(["emoji", "dream", "picks"], refused, "http://127.0.0.1:8000", 12.4) == (
        "plait serves emoji, picks at http://127.0.0.1:8000 (ready after 12 s); not loaded: dream "
        "(/models/dream: no such folder); ControlNet wide (made for sdxl, the base model is sd1)"
    )
    assert start_line(["emoji"], {}, "http://h", 1.0) == "plait serves emoji at http://h (ready after 1 s)"


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
