"""What `test_hosts` runs on the head: deploys an application, asks it all the time, and says what came of it.

Reads commands from its input, a line each, and answers each with a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from support import asking

URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Asked:
    """One request: when (seconds of this process), and what came: ok, wrong, or a status."""

    began_s: float
    took_s: float
    outcome: str


class Load:
    """Requests one after the other, each kind on a thread of its own, until it is stopped."""

    def __init__(self, asks: list[Callable[[], str]]) -> None:
        self.asked: list[Asked] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(ask,), daemon=True) for ask in asks]
        for thread in self._threads:
            thread.start()

    def _run(self, ask: Callable[[], str]) -> None:
        while not self._stopped.is_set():
            began_s = time.monotonic()
            outcome = ask()
            self.asked.append(Asked(began_s, time.monotonic() - began_s, outcome))
            time.sleep(0.02)

    def stop(self) -> None:
        """Waits for the last ones."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)


def post(path: str, body: Any) -> tuple[int, Any]:
    """Status and JSON; 0 where nothing answers."""
    try:
        answer = asking.ask(URL + path, body)
    except OSError as error:
        return 0, str(error)
    return answer.status, answer.json() if answer.status == 200 else answer.text[:200]


def ranking(number: int, requests: list[Any]) -> Callable[[], str]:
    """Asks for one ranking after the other and compares bits."""
    turn = iter(range(number, 1 << 40))

    def ask() -> str:
        body, expected = requests[next(turn) % len(requests)]
        status, answer = post("/v2/models/parts/infer", body)
        if status != 200:
            return f"{status} {answer}"
        scores = torch.tensor(answer["outputs"][0]["data"])
        return "ok" if torch.equal(scores, torch.tensor(expected)) else "wrong"

    return ask


def whereabouts(serve: Any, deployment: str) -> list[str]:
    """The addresses of the hosts of a deployment's replicas."""
    from plait_fabric.rpc.replicas import NoReplica
    from plait_serving.deployments.fabric_endpoints import ServeReplicas

    try:
        found = ServeReplicas(deployment, serve.get_deployment_handle(deployment, "plait")).replicas()
    except NoReplica:
        return []
    return sorted(
        address.removeprefix("tcp://").rpartition(":")[0]
        for replica in found
        for address in replica.addresses
        if address.startswith("tcp://")
    )


def main() -> None:
    """Attaches, starts Serve, and obeys."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints belongs to the log
    import ray
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    address, application, requests = sys.argv[1], yaml.safe_load(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    ray.init(address=address, log_to_driver=False, logging_level="error", _node_ip_address=address.split(":")[0])
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": 8000})
    load: Load | None = None
    print(json.dumps("there"), file=answers, flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        answer: Any = None
        if command == "deploy":
            schema = ServeDeploySchema.model_validate({"applications": [application]})
            serve.context._get_global_client().deploy_apps(schema)
        elif command == "probe":
            answer = ranking(0, requests)()
        elif command == "load":
            load = Load([ranking(number, requests) for number in range(2)])
        elif command == "now":
            answer = time.monotonic()
        elif command == "since" and load is not None:
            answer = [asdict(one) for one in list(load.asked) if one.began_s >= float(words[0])]
        elif command == "where":
            answer = whereabouts(serve, words[0])
        elif command == "status":
            answer = {
                name: f"{it.status} {it.message} {it.replica_states}"
                for name, it in serve.status().applications["plait"].deployments.items()
            }
        elif command == "stop" and load is not None:
            load.stop()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
