"""What the flags of `run` stand for, and what is refused or said before anything is sent."""

from __future__ import annotations

import shlex
import socket

import pytest
import yaml
from typer.testing import CliRunner

from plait_loadtest.cli import app
from plait_loadtest.load import load_scenario
from plait_loadtest.session import foreseen


def loadtest(*arguments):
    """The command in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def shown(*arguments):
    """The scenario that these flags make."""
    done = loadtest("run", *arguments, "--show-config")
    assert done.exit_code == 0, done.stderr
    return yaml.safe_load(done.stdout)


@pytest.mark.parametrize(
    ("flags", "method", "body"),
    [
        (("--method", "put", "--body", "{}"), "PUT", "{}"),
        (("--body", "{}"), "POST", "{}"),
        (("--body", ""), "POST", ""),
        (("--method", "DELETE"), "DELETE", ""),
        (("--api", "raw"), "GET", ""),
    ],
)
def test_a_method_and_a_body_make_a_raw_request(flags, method, body):
    """Without an API of its own; a body is posted unless said otherwise."""
    scenario = shown(*flags)
    assert scenario["target"]["api"] == "raw"
    assert (scenario["mix"][0]["method"], scenario["mix"][0]["body"]) == (method, body)


def test_certificates_are_not_judged_or_judged_by_a_file(tmp_path):
    """`--insecure` and `--ca`; a file without certificates, and both together, are refused."""
    assert shown("--insecure")["target"]["verify_tls"] is False
    assert shown()["target"]["verify_tls"] is True
    nothing = tmp_path / "ca.pem"
    nothing.write_text("no certificate\n")
    for flags, says in (
        (("--ca", nothing), "holds no certificates"),
        (("--ca", tmp_path / "none.pem"), "there is no file"),
        (("--ca", nothing, "--insecure"), "has no use where verify_tls is false"),
    ):
        done = loadtest("run", *flags)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("plait loadtest: target.ca: ")
        assert says in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run --threshold 'p97_ms < 3'", "where METRIC is one of"),
        ("run --set x", "--set 'x': write KEY=VALUE"),
        ("run --set name=[", "--set 'name=[': the value is not YAML"),
        ("run --set name=2026-02-30", "--set 'name=2026-02-30': the value is not YAML"),
        ("run --header nothing", "write 'Name: value'"),
        ("run --api images --method PUT", "mix.0.method: there is no such setting"),
        ("run --json no/such/folder/a.json", "--json: the folder no/such/folder does not exist"),
        ("run --json .", ". cannot be written"),
        ("run --raw rows.txt", "--raw rows.txt: the name must end in .csv, .jsonl, .npz"),
        ("run --save part.json", "--save part.json: the name must end in .npz"),
        ("run --part 0/2", "--part '0/2': write K/N"),
        ("run --part 3/2", "--part '3/2': write K/N"),
        ("run --part half", "--part 'half': write K/N"),
        ("run --start-at soon", "--start-at 'soon': write a date and a time"),
        ("run --http2", "--http2: plait loadtest speaks HTTP/1.1 only"),
        ("run --find-capacity", "slo"),
        ("run smoke --within 0", "belong to --find-capacity"),
        ("run smoke --confirm", "belong to --find-capacity"),
        ("run smoke --find-capacity --count 10", "leave out --count and --threshold"),
        ("run smoke --find-capacity --threshold 'p99_ms < 9'", "leave out --count and --threshold"),
        ("run smoke --find-capacity --part 1/2", "leave out --part, --start-at and --save"),
        ("run --json same.html --html same.html", "--json and --html are both same.html"),
    ],
)
def test_wrong_usage_is_exit_2_and_one_sentence(command, says, tmp_path, monkeypatch):
    """Before anything is sent: what cannot be read or written, and flags that would be ignored."""
    monkeypatch.chdir(tmp_path)
    done = loadtest(*shlex.split(command))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


@pytest.mark.parametrize("extra", [(), ("--find-capacity", "--slo-ms", 50)])
def test_a_url_that_refuses_fails_at_once(extra):
    """Nobody listens, or nobody knows the name: one sentence, exit code 1, and no run of that duration."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", f"http://localhost:{port}", "http://no-such-host.invalid"):
        done = loadtest("run", "--url", url, "--api", "raw", "--duration", 3600, *extra)
        sentences = [line for line in done.stderr.splitlines() if "takes" not in line]
        assert (done.exit_code, done.stdout, len(sentences)) == (1, "", 1)
        assert sentences[0].startswith(f"plait loadtest: {url} cannot be reached, nothing was sent: ")


def test_what_an_slo_needs_is_said_before_the_run():
    """A p99 takes 100 requests, a p95 20; a class has its share of what is planned. Enough says nothing."""
    mix = [{"name": "often", "weight": 3}, {"name": "rare"}]
    settings = {"mix": mix, "slo": {"latency_ms": 250, "percentile": 99}, "duration_s": 10}
    two = load_scenario(settings, {"arrivals.rate_per_s": 20})
    assert foreseen(two) == [
        "rare: 99 % within 250 ms takes 100 requests to judge, and some 50 are planned (--duration, --rate, --count)"
    ]
    assert foreseen(load_scenario(settings, {"arrivals.rate_per_s": 40})) == []
    assert len(foreseen(load_scenario(settings, {"arrivals.rate_per_s": 40, "count": 99}))) == 2
    assert len(foreseen(load_scenario({"slo": {"latency_ms": 5}, "duration_s": 19}, {}))) == 1
    assert foreseen(load_scenario({"slo": {"latency_ms": 5}, "duration_s": 20}, {})) == []
