"""`fakes.serve` on a node with that address: ``python -m fakes.serve_on_node ADDRESS PORT [path=value ...]``.

Ray takes any node whose process it finds for the one that it is on, the head first. On one machine with several nodes
it finds them all.
"""

from __future__ import annotations

import sys
from typing import Any

from ray._private import services

from fakes.serve import main

if __name__ == "__main__":
    here = sys.argv.pop(1)
    find = services.get_node_to_connect_for_driver

    def find_here(*given: Any, **named: Any) -> Any:
        return find(*given, **named | {"node_ip_address": here})

    services.get_node_to_connect_for_driver = find_here
    sys.exit(main())
