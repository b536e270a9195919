"""Where the generator ends, and not the server, the run says so: which limit was met, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys

from fakes.bad_server import bad_server


def test_descriptors_that_run_out_are_no_refusals():
    """60 requests that take a second each, within a second, need more files than 40: the others were not sent, and the
    run is invalid for that reason, which says what to do."""
    load = ("--api", "raw", "--path", "/second", "--arrivals", "constant", "--rate", "60", "--duration", "1")
    with bad_server() as server:
        command = [sys.executable, "-m", "plait_loadtest", "run", "--url", server.url, *load, "--json", "-"]
        limited = ["bash", "-c", 'ulimit -n 40 && exec "$@"', "limited", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    report, sent = json.loads(done.stdout), len(server.asked)
    assert (report["requests"], report["succeeded"], report["errors"]) == (60, sent, {"not_sent": 60 - sent})
    assert 0 < sent < 40
    texts = {reason["code"]: reason["text"] for reason in report["reasons"]}
    assert report["valid"] is False
    says = f"out of file descriptors: {60 - sent} requests were not sent; raise ulimit -n, which is 40, or "
    assert texts["limit"].startswith(says)
