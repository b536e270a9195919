"""What a cluster's answers mean."""

from __future__ import annotations

from plait.doctor.cluster import COMPARED, NodeFacts, node_findings, serve_findings

SAME = dict.fromkeys(COMPARED, "1.0")
RUNNING = {"applications": {"plait": {"status": "RUNNING", "deployments": {"engine": {"status": "HEALTHY"}}}}}


def node(name, *, alive=True, **changes):
    return NodeFacts(name=name, alive=alive, versions={**SAME, **changes} if alive else {})


def verdicts(findings):
    return [(it.name, it.verdict.value) for it in findings]


def test_equal_nodes_are_fine():
    """Two nodes of one image."""
    assert verdicts(node_findings([node("a"), node("b")])) == [("nodes", "ok"), ("versions", "ok")]


def test_differing_versions_are_named_with_their_nodes():
    """Who has what, in one line."""
    nodes, versions = node_findings([node("a"), node("b", torch="2.0"), node("c", plait=None)])
    assert (nodes.verdict, versions.verdict) == ("ok", "fail")
    assert versions.detail == "plait 1.0 on a b, missing on c; torch 1.0 on a c, 2.0 on b"


def test_lost_and_silent_nodes_are_named():
    """A lost node is a warning (replicas move), one that does not answer is a failure."""
    silent = NodeFacts(name="mute", alive=True, versions={})
    found = list(node_findings([node("a"), node("gone", alive=False), silent]))
    assert verdicts(found) == [("nodes", "warn"), ("versions", "fail"), ("versions", "ok")]
    assert "gone" in found[0].detail
    assert "mute" in found[1].detail


def test_applications_that_do_not_run_are_named_with_the_reason():
    """The deployment's own message is shown."""
    assert verdicts(serve_findings(RUNNING)) == [("serve", "ok")]
    assert verdicts(serve_findings({})) == [("serve", "warn")]
    broken = {"status": "UNHEALTHY", "message": "no such folder: /models/x"}
    status = {"applications": {"plait": {"status": "DEPLOYING", "deployments": {"engine": broken}}}}
    (found,) = serve_findings(status)
    assert found.verdict == "fail"
    assert "engine unhealthy (no such folder: /models/x)" in found.detail
    sick = {**RUNNING, "proxies": {"n1": "HEALTHY", "n2": "UNHEALTHY"}}
    assert verdicts(serve_findings(sick)) == [("serve", "ok"), ("serve", "fail")]
