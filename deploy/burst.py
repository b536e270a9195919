"""Send a burst of image requests at once, and check that it spread over the replicas of the engine.

    python deploy/burst.py --url http://plait:8000 --metrics http://10.0.0.4:8080/metrics --metrics http://10.0.0.5:8080/metrics

`--metrics` are the metrics of Ray's nodes, which count requests by replica (Ray reports them every 10 s). Exit code 0:
every request was answered, and every replica had at least half of its fair share. Needs Python alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_SERIES = re.compile(
    r"^ray_serve_deployment_request_counter(?:_total)?\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TRIES = 5
_STILL_S = 12.0
"""Counts that did not change for so long are whole: each node's processes report every 10 s, not all at once."""
_REPORT_S = 60.0
"""How long to wait for that; counts of a server that others use never stand still."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return the exit code."""
    parser = argparse.ArgumentParser(description="Does a burst spread over the replicas?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--metrics", action="append", required=True, help="of a Ray node; repeatable")
    parser.add_argument("--deployment", default="engine")
    parser.add_argument("--replicas", type=int, help="how many there are; if left out, as many as report")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--key", help="an API key")
    asked = parser.parse_args(arguments)
    before = settled(asked.metrics, asked.deployment)
    with ThreadPoolExecutor(asked.requests) as threads:
        sent = list(threads.map(lambda seed: send(asked.url, seed, asked.steps, asked.key), range(asked.requests)))
    wrong = [status for status in sent if status != 200]
    after = settled(asked.metrics, asked.deployment, sum(before.values()) + len(sent) - len(wrong))
    spread = {replica: after[replica] - before.get(replica, 0) for replica in after}
    for replica, count in sorted(spread.items()):
        print(f"{count:6.0f}  {replica}")
    if wrong:
        print(f"{len(wrong)} of {asked.requests} requests were not answered: {dict(Counter(wrong))}")
        return 1
    return verdict(spread, asked.replicas)


def verdict(spread: dict[str, float], replicas: int | None) -> int:
    """Return 0 if every replica had at least half of its fair share of the calls (Ray counts several a request), else
    1. `replicas`: how many there are; None: as many as report. Ray reports lost ones for a while."""
    counts = sorted(spread.values(), reverse=True)[:replicas]
    if len(counts) < max(2, replicas or 0):
        print(f"{len(counts)} replicas report: nothing can spread")
        return 1
    fewest = sum(counts) / len(counts) / 2
    short = [count for count in counts if count < fewest]
    print(f"{len(short)} of {len(counts)} replicas had less than {fewest:g}" if short else "it spreads")
    return 1 if short else 0


def send(url: str, seed: int, steps: int, key: str | None) -> int:
    """Ask for an image; return the status, 0 if there was no answer. A refusal is obeyed, and tried again."""
    body = {"prompt": "red apple", "seed": seed, "num_inference_steps": steps}
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    request = urllib.request.Request(f"{url}/v1/images/generations", json.dumps(body).encode(), headers)  # noqa: S310
    for _ in range(_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310  # the person's own address
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            status, wait_s = error.code, error.headers.get("retry-after", "1")
            error.close()
            if status != 429:
                return status
            time.sleep(min(float(wait_s), 30.0))
        except OSError:
            return 0
    return 429


def settled(addresses: Sequence[str], deployment: str, floor: float = 0) -> dict[str, float]:
    """Return the counts once they are at least `floor` in all and stand still, or as they are when that took too long.

    The sum alone does not say that all have reported: Ray counts several calls a request, so one replica's report may
    reach it.
    """
    found, since_s = by_replica(addresses, deployment), time.monotonic()
    until_s = since_s + _REPORT_S
    while (now_s := time.monotonic()) < until_s and (sum(found.values()) < floor or now_s < since_s + _STILL_S):
        time.sleep(1)
        if (read := by_replica(addresses, deployment)) != found:
            found, since_s = read, time.monotonic()
    return found


def by_replica(addresses: Sequence[str], deployment: str) -> dict[str, float]:
    """Return how many calls each replica of the deployment has had for requests of clients, by all nodes' metrics. What
    an ingress asks by itself has no route."""
    found: dict[str, float] = {}
    for address in addresses:
        with urllib.request.urlopen(address, timeout=_REPORT_S) as answer:  # noqa: S310  # the person's own address
            text = answer.read().decode()
        for series in _SERIES.finditer(text):
            labels = dict(_LABEL.findall(series["labels"]))
            if labels.get("deployment") == deployment and labels.get("route"):
                replica = labels.get("replica", "")
                found[replica] = found.get(replica, 0.0) + float(series["value"])
    return found


if __name__ == "__main__":
    sys.exit(main())
