"""Lines of the log name the requests that their thread or task works for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from plait_disagg.request_log import MAX_REQUESTS, add_requests, on_behalf_of, requests_at_hand


def line(message: str) -> str:
    """A line as a handler with the filter writes it."""
    record = logging.LogRecord("plait", logging.INFO, "", 0, message, (), None)
    assert add_requests(record)
    return logging.Formatter("%(message)s%(requests)s").format(record)


def test_a_line_names_the_requests_at_hand_and_no_others() -> None:
    """Each once, and none that it names itself; what was at hand before is again afterwards."""
    with on_behalf_of(lambda: ("first", "second", "first", "")):
        assert line("it failed") == "it failed [first, second]"
        assert line("request first failed") == "request first failed [second]"
        with on_behalf_of(lambda: ("third",)):
            assert line("it failed") == "it failed [third]"
        assert requests_at_hand() == ["first", "second"]
    assert line("it failed") == "it failed"


def test_ids_are_read_for_a_line_only_and_of_a_large_batch_not_all() -> None:
    """Thousands of requests share a batch, and hardly one of them is ever logged."""
    read: list[int] = []

    def ids() -> Iterator[str]:
        for number in range(MAX_REQUESTS + 10):
            read.append(number)
            yield f"r{number}"

    with on_behalf_of(ids):
        assert read == []
        assert len(requests_at_hand()) == MAX_REQUESTS
