"""What failed for the machine's sake runs once more; what is wrong fails the run all the same."""

from __future__ import annotations

import pytest

from support.again import may_run_again

ONCE = """
    from pathlib import Path
    import pytest

    @pytest.mark.parametrize("n", range({count}))
    def test_starts(n):
        mark = Path(__file__).with_name(f"ran-{{n}}")
        ran = mark.exists()
        mark.touch()
        assert ran, "the machine was busy"
"""
WRONG = """
    def test_is_wrong():
        assert False, "it is wrong"
"""
RIGHT = """
    def test_is_right():
        pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest with the plugin and no other on files by folder and name: its result."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(files, *options):
        for path, text in files.items():
            made = pytester.makepyfile(text)
            (pytester.path / path).parent.mkdir(parents=True, exist_ok=True)
            made.rename(pytester.path / path)
        pytester.makeini("[pytest]\nmarkers =\n    cluster: starts Ray\naddopts = --import-mode=importlib")
        return pytester.runpytest("-p", "support.again", "-p", "support.skips", *options)

    return run


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_what_passes_then_is_printed_and_counts_as_passed(run, workers):
    """Up to three, with the reason that the first try gave."""
    files = {"tests/integration/test_a.py": ONCE.format(count=3), "tests/unit/test_b.py": RIGHT}
    done = run(files, "--again", *workers)
    assert done.ret == 0
    lines = [line for line in done.outlines if line.startswith("FLAKY")]
    assert sorted(lines) == [
        f"FLAKY tests/integration/test_a.py::test_starts[{n}]: call: AssertionError: the machine was busy"
        for n in range(3)
    ]


@pytest.mark.parametrize(
    "files",
    [
        {"tests/integration/test_a.py": ONCE.format(count=4)},
        {"tests/unit/test_a.py": ONCE.format(count=1)},
        {"tests/integration/test_a.py": ONCE.format(count=1), "tests/property/test_b.py": WRONG},
        {"tests/integration/test_a.py": ONCE.format(count=1), "tests/e2e/test_b.py": "import nothing_of_that_name"},
    ],
    ids=["four", "unit", "beside one that is wrong", "beside a file that cannot be read"],
)
def test_nothing_runs_again_where_more_is_wrong(run, files):
    """More than three, a test without processes, a file with an error: the run has failed."""
    done = run(files, "--again")
    assert done.ret in {1, 2}
    assert "once more" not in done.stdout.str()
    assert "FLAKY" not in done.stdout.str()


def test_what_fails_twice_is_a_failure(run):
    """Though another one passed at its second try."""
    files = {"tests/e2e/test_a.py": ONCE.format(count=1), "tests/e2e/test_b.py": WRONG}
    done = run(files, "--again")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["FLAKY tests/e2e/test_a.py::test_starts[[]0]: *"])


def test_without_the_option_nothing_runs_again(run):
    """Who works on one test wants to see it fail."""
    done = run({"tests/e2e/test_a.py": ONCE.format(count=1)})
    assert done.ret == 1


def test_a_skip_that_nobody_expects_fails_a_flaky_run_too(run):
    """The list of skips judges after the second try."""
    skips = "import pytest\ndef test_skips():\n    pytest.skip('the moon is wrong')"
    done = run({"tests/e2e/test_a.py": ONCE.format(count=1), "tests/e2e/test_b.py": skips}, "--again", "--strict-skips")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["FLAKY *"])


def test_tests_of_processes_are_known_by_folder_or_by_their_ray():
    """Never those of units, contracts and properties, whatever they start."""
    assert may_run_again("tests/security/test_cluster.py::test_x", {"cluster": 1})
    assert not may_run_again("tests/security/test_names.py::test_x", {})
    assert not may_run_again("tests/contract/test_fabric.py::test_x", {"cluster": 1})
