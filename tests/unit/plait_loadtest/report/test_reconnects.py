"""Requests whose kept-alive connection was closed before they reached the server are in every report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from plait_loadtest.report.html import page
from plait_loadtest.report.outputs import report
from plait_loadtest.report.table import notes
from plait_loadtest.session import finished
from support.loadtest_records import records, result, scenario


def told(reconnects):
    """What table, JSON and page say of a run."""
    run = replace(result(records(np.arange(1000) / 100.0, 20.0)), reconnects=reconnects)
    session = finished(run, scenario(), ())
    document = report(session)
    return notes(session.summary, ()), document, page(session, document)


def test_replaced_connections_are_in_every_report():
    """With their number; where there were none, nothing is said."""
    lines, document, html = told(7)
    assert "sent on a new connection, as the server had closed the kept one: 7" in lines
    assert document["reconnects"] == 7
    assert "7 requests left on a new connection" in html
    lines, document, html = told(0)
    assert not any("new connection" in line for line in lines)
    assert document["reconnects"] == 0
    assert "new connection" not in html
