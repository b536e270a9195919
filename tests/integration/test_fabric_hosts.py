"""Three hosts over TCP, in network namespaces: two shards of tables and who asks them; one is cut off and returns."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support.fabric_hosts import Hosts, hosts, said, stop, tell
from support.waiting import wait_for

SHARD = """
import sys
from support.fabric_rows import shard
number, address, secret = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
worker = shard(number, address=address, secret=secret)
print(worker.addresses[0], flush=True)
sys.stdin.read()
"""

ASKER = """
import json, sys
import torch
from plait_fabric import FabricOptions
from plait_disagg.tables.protocols import ShardLost
from plait_disagg.tables.reference import SeparateTables
from support.fabric import Replicas
from support.fabric_rows import merged, reach
from support.tables import make_ask, make_weights
secret, *addresses = sys.argv[1:]
options = FabricOptions(tcp_keepalive_idle_s=1)
shards = [
    reach(number, replicas=Replicas({"s": address}, secret=bytes.fromhex(secret), timeout_s=1.0, options=options),
          answer_timeout_s=1.0)
    for number, address in enumerate(addresses)
]
tables = merged(shards)
asks = [make_ask("t0", "sum", [[1, 2], [], [6]]), make_ask("t3", "rows", [[5, 60]])]
wanted = SeparateTables(make_weights()).lookup(asks)
print("ready", flush=True)
for line in sys.stdin:
    try:
        found = tables.lookup(asks)
        right = all(torch.equal(a, b) for a, b in zip(found, wanted))
        print(json.dumps({"right": right}), flush=True)
    except ShardLost as error:
        print(json.dumps({"lost": str(error)}), flush=True)
"""


@pytest.fixture
def three() -> Iterator[Hosts]:
    """Three hosts and their switch."""
    with hosts(3) as made:
        yield made


def test_a_host_that_is_cut_off_is_an_error_and_comes_back(three: Hosts) -> None:
    """A lookup over two hosts is right; with one cut off it fails by name; plugged in again it works."""
    secret = bytes(range(32)).hex()
    shards = [three.start(host, SHARD, str(host - 1), f"tcp://{three.address(host)}:9413", secret) for host in (1, 2)]
    processes = list(shards)
    try:
        addresses = [said(shard) for shard in shards]
        assert addresses == [f"tcp://{three.address(host)}:9413" for host in (1, 2)]
        asker = three.start(3, ASKER, secret, *addresses)
        processes.append(asker)
        assert said(asker) == "ready"

        def ask() -> dict[str, object]:
            tell(asker, "ask")
            answer: dict[str, object] = json.loads(said(asker))
            return answer

        assert ask()["right"] is True
        three.plug(2, connected=False)
        for _ in range(2):  # the second dials in vain
            answer = ask()
            assert str(answer["lost"]).startswith("shard 1 of shop: "), answer
        three.plug(2, connected=True)
        wait_for(lambda: "lost" not in ask())
        assert ask()["right"] is True
    finally:
        stop(processes)
