"""There is one request and reply layer: one loop that accepts, and nothing that its users need not have."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = ("serving", "disagg", "autoconfig", "kernels", "deploy", "loadtest")
TRANSPORTS = "disagg/plait_fabric/transport/"


def _accepts_in_a_loop(tree: ast.AST) -> bool:
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While | ast.For)]
    calls = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Attribute) and call.func.attr == "accept" for call in calls)


def test_one_loop_accepts() -> None:
    """ControlNets, rank workers and shards are served by the same few lines; only transports have their own."""
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if _accepts_in_a_loop(ast.parse(path.read_text()))
    ]
    assert [name for name in found if not name.startswith(TRANSPORTS)] == ["disagg/plait_fabric/rpc/server.py"]


def test_rpc_needs_no_torch() -> None:
    """Whoever moves bytes starts without seconds of imports; and the fabric knows none of its users."""
    code = (
        "import sys\n"
        "from plait_fabric.rpc import client, fields, on_demand, server\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'plait', 'plait_disagg', 'plait_serving'}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
