"""What a cluster's answers mean."""

from __future__ import annotations

from dataclasses import replace

from plait.doctor.cluster import COMPARED, NodeFacts, node_findings, placement_findings, serve_findings

SAME = dict.fromkeys(COMPARED, "1.0")
RUNNING = {"applications": {"plait": {"status": "RUNNING", "deployments": {"engine": {"status": "HEALTHY"}}}}}


def node(name, *, alive=True, **changes):
    return NodeFacts(name=name, alive=alive, versions={**SAME, **changes} if alive else {})


def verdicts(findings):
    return [(it.name, it.verdict.value) for it in findings]


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


def test_a_placed_application_says_which_classes_of_nodes_are_missing_or_unknown():
    """Nodes carry their class as a label; an application that is not placed says nothing."""
    nodes = [replace(node("n1"), node_class="a"), replace(node("n2", alive=False), node_class="b"), node("n3")]
    running = {"engine@a": {"replica_states": {"RUNNING": 2}}, "engine@b": {"replica_states": {"STARTING": 1}}}
    status = {"applications": {"plait": {"status": "RUNNING", "deployments": {"ingress": {}, **running}}}}
    (missing,) = placement_findings(nodes, status)
    assert (missing.name, missing.verdict) == ("placement", "warn")
    assert missing.detail == "no node with the label plait-class=b"
    nodes[1:2] = [replace(node("n2"), node_class="b"), replace(node("n4"), node_class="typo")]
    (unknown,) = placement_findings(nodes, status)
    assert unknown.detail == "plait knows no class typo"
    del nodes[2]
    (fine,) = placement_findings(nodes, status)
    assert (fine.verdict, fine.detail) == ("ok", "plait: 1 models on classes a, b")
    running["engine@a"]["replica_states"] = {}
    (idle,) = placement_findings(nodes, status)
    assert idle.detail == "no replica of engine"
    assert list(placement_findings(nodes, RUNNING)) == []
