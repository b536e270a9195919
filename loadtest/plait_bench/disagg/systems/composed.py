"""The peer that Ray Serve itself offers: two deployments, the halves of the model, one calling the other's handle.

`python -m plait_bench.disagg.systems.composed FOLDER` prints its port. The halves are ours, and so is the protocol:
what is compared is how they are joined.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from functools import partial


def main(folder: str) -> None:
    """Run the composition; see the module docstring. Ends on SIGTERM."""
    # As `plait serve` does: Ray's 15 is for machines that people work at.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray import serve

    from plait_bench.disagg.systems.composition import DenseDeployment, SparseDeployment
    from plait_bench.disagg.systems.serving import free_port

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20,
            _temp_dir=scratch, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        try:
            http = {"host": "127.0.0.1", "port": port}
            serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"enable_access_log": False})
            deployed = partial(serve.deployment, ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
            serve.run(
                deployed(SparseDeployment).bind(folder, deployed(DenseDeployment).bind(folder)),
                name="composed",
                route_prefix="/",
            )
            print(port, flush=True)
            signal.pause()
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
