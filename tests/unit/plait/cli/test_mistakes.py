"""What goes wrong at the command line is one sentence and an exit code, whatever command it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cli.main import main

FEWER = "'--candidates': Input should be less than or equal to 10000"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["doctor", "--port", "-1"], 2, "'--port': Input should be greater than or equal to 0"),
        (["doctor", "--port", "99999"], 2, "'--port': Input should be less than or equal to 65535"),
        (["recommend", "--user", '{"age_band": NaN}'], 2, "--user: not JSON: NaN is no number"),
        (["models", "cut", "rm1", "--candidates", "1000000000"], 2, FEWER),
        (["models", "cut", "rm1", "--svg", "/nosuch/x.svg"], 1, "/nosuch/x.svg can not be written"),
        (["models", "package", "x:y", "-o", "out", "--candidates", "1000000000"], 2, FEWER),
        (["bench", "loadtest", "--workload", "nosuch"], 1, "there is no workload 'nosuch'"),
        (["bench", "autoconfig", "--data", "/nosuch", "--workload", "falcon"], 1, "nothing was measured: falcon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On stderr, with the option's or the file's name."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert says in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []
