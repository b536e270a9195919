"""The list of skips: what is expected is printed, what is not fails the run where nobody reads."""

from __future__ import annotations

import re

import pytest

from support.skips import LIST, allow_list

TESTS = """
    import pytest

    @pytest.mark.parametrize("n", [1, 2])
    def test_without_cuda(n):
        pytest.skip("no CUDA device")

    @pytest.mark.xfail(reason="known", strict=True)
    def test_known():
        assert False

    def test_fine():
        pass
"""
NOVEL = (
    TESTS
    + """
    @pytest.mark.skipif(True, reason="the moon is wrong")
    def test_novel():
        pass
"""
)
WHOLE_FILE = """
    import pytest
    pytest.importorskip("no_such_module_of_ours", reason="a library is missing")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest with the plugin on files of tests: its result. `CI` is unset, but for what the test sets."""
    monkeypatch.delenv("CI", raising=False)
    allowed = pytester.path / "allowed.toml"
    allowed.write_text('[[allowed]]\nreason = "no CUDA"\nwhy = "CI has no GPU"\n')

    def run(*options, **files):
        pytester.makepyfile(**files)
        common = ("-p", "support.skips", "-p", "no:randomly", "-p", "no:asyncio", "--allowed-skips", str(allowed))
        return pytester.runpytest(*common, *options)

    return run


def test_every_reason_is_listed_with_its_number(run):
    """What the list names passes even when strict; an expected failure is no skip."""
    done = run("--strict-skips", test_a=TESTS)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["*skipped, by reason*", "   2  no CUDA device  [[]CI has no GPU]"])
    assert "known  " not in done.stdout.str()


@pytest.mark.parametrize(("ci", "code"), [(None, 0), ("", 0), ("false", 0), ("true", 1)])
def test_an_unexpected_skip_fails_in_ci_only(run, monkeypatch, ci, code):
    """A person is told, CI fails."""
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    done = run(test_a=NOVEL)
    assert done.ret == code
    done.stdout.fnmatch_lines(["   1  the moon is wrong  [[]not in the allow-list]", "*test_a.py::test_novel"])


def test_a_file_that_skips_as_a_whole_counts(run):
    """`importorskip` at the top of a file is a skip too, also when it is all there is."""
    done = run("--strict-skips", test_b=WHOLE_FILE)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["   1  a library is missing  *"])


def test_workers_report_to_one_list(run):
    """With xdist each skip is counted once, and an unexpected one fails the run."""
    done = run("--strict-skips", "-n", "2", test_a=NOVEL, test_b=WHOLE_FILE)
    assert done.ret == 1
    done.stdout.fnmatch_lines(
        ["   1  a library is missing  *", "   2  no CUDA device  *", "   1  the moon is wrong  *"]
    )


def test_a_failure_stays_a_failure(run):
    """An interrupted or failed run keeps its own exit status."""
    done = run("--strict-skips", "--maxfail=1", test_a="def test_it(): assert False", test_b=WHOLE_FILE)
    assert done.ret == 1
    assert run("--strict-skips", test_c="syntax error").ret == 2


def test_an_entry_says_why(tmp_path):
    """The list in use is well formed and its reasons differ; an entry without a why is refused."""
    reasons = [entry.reason.pattern for entry in allow_list(LIST)]
    assert len(set(reasons)) == len(reasons) > 0
    (tmp_path / "skips.toml").write_text('[[allowed]]\nreason = "anything"\n')
    with pytest.raises(ValueError, match=re.escape("needs 'reason' and 'why'")):
        allow_list(tmp_path / "skips.toml")
