"""The library on disk: database and JSON lines; what is newer or earlier, and what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import optuna
import pytest

from plait_autoconfig.errors import LibraryError
from plait_autoconfig.rows import dump_lines, load_lines
from plait_autoconfig.store import LibraryStore, read_library, write_library
from plait_autoconfig.values import FailureKind
from support.autoconfig import failed, measured, run_of
from support.forking import forked, killed
from support.waiting import wait_for

TRIALS = (
    measured(0, {"cpu": 1, "batch": 2, "fused": True, "gpu": "T4", "share": 0.5}, rate=3.0, p99_ms=1e-7),
    failed(1, {"cpu": 2, "batch": 2}, FailureKind.OUT_OF_MEMORY),
    measured(2, {"cpu": 3, "batch": 2}, p99_ms=4.0),
)
RUN = run_of(*TRIALS)
OTHER = run_of(measured(0, {"cpu": 1, "batch": 1}, rate=1.0), run_id="run-2", goals=())
NEWER = '{"plait_library":3,"kind":"trial","shape":"unheard of"}'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plait_library": 0}, "line 2 of the library: plait_library: "),
        ({"plait_library": 3}, "line 2 of the library has format 3, .* reads 2; update plait"),
        ({"speed": 1}, "line 2 of the library: speed: Unexpected"),
        ({"config": {"cpu": None}}, "line 2 of the library: config.cpu"),
        ({"metrics": {}}, "line 2 of the library: an outcome has either metrics or a failure"),
        ({"run_id": "else"}, "line 2 of the library is a trial of else, a run that no line before it describes"),
    ],
)
def test_wrong_lines_are_named(change, said):
    """A line that this version should be able to read and cannot is an error with its number and field; who reads one
    of a later version has to update."""
    run_line, trial_line = dump_lines([OTHER])
    with pytest.raises(LibraryError, match=said):
        load_lines([run_line, json.dumps({**json.loads(trial_line), **change}), run_line])


def test_a_run_has_a_date():
    """A date that is none is an error when it is read, not when a run is weighed."""
    with pytest.raises(LibraryError, match=r"line 1 of the library: started_at: .*yesterday"):
        load_lines(dump_lines([run_of(started_at="yesterday")]))


def test_garbage_in_the_middle_is_an_error(tmp_path: Path):
    """Only the last line may be torn; the message names the file and the line."""
    run_line, trial_line = dump_lines([OTHER])
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{run_line}\n{trial_line[:20]}\n{trial_line}\n")
    with pytest.raises(LibraryError, match=r"bad.jsonl: line 2 of the library is no JSON"):
        read_library(path)
    path.write_text(f"{run_line}\n{run_line}\n")
    with pytest.raises(LibraryError, match="line 2 of the library describes the run run-2 again"):
        read_library(path)
    with pytest.raises(LibraryError, match=r"none.jsonl: .*No such file"):
        read_library(tmp_path / "none.jsonl")


@pytest.mark.parametrize("location", ["library.journal", "sqlite:///{folder}/library.db"])
def test_runs_come_back_from_a_store(tmp_path: Path, location: str):
    """A journal file and a database keep runs and trials; nothing is stored twice, new trials are added."""
    place = location.format(folder=tmp_path) if "://" in location else str(tmp_path / "deep" / location)
    store = LibraryStore.open(place)
    assert store.runs() == ()
    assert store.add(run_of(*TRIALS[:2])) == 2
    assert store.add(RUN) == 1
    assert store.add(RUN) == 0
    store.add(OTHER)
    assert LibraryStore.open(place).runs() == (RUN, OTHER)


def earlier(folder: Path) -> Path:
    """A copy of a library that plait 0.1 kept in Optuna's journal: RUN, OTHER and a line of a later version."""
    return Path(shutil.copy(Path(__file__).parent / "earlier_library.journal", folder / "past.log"))


def test_a_journal_of_an_earlier_version_is_read_and_added_to(tmp_path: Path):
    """Under its own name, and with what that version could not read, or somebody else keeps there; from then on it is a
    database."""
    path = earlier(tmp_path)
    journal = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    optuna.create_study(study_name="theirs", storage=journal).add_trial(optuna.trial.create_trial(value=1.0))
    store = LibraryStore.open(path)
    assert store.runs() == (RUN, OTHER)
    kept = optuna.load_study(study_name="plait-foreign", storage=f"sqlite:///{path}").user_attrs
    assert [*kept.values()] == [NEWER]
    assert optuna.load_study(study_name="theirs", storage=f"sqlite:///{path}").best_value == 1.0
    assert store.add(run_of(*TRIALS, run_id="run-3")) == 3
    assert len(LibraryStore.open(path).runs()) == 3
    assert path.read_bytes().startswith(b"SQLite format 3")
    assert [each.name for each in tmp_path.iterdir()] == ["past.log"]


@pytest.mark.parametrize("folder", ["a?b", "a%3Fb#{c}", "a?uri=true&mode=ro"])
def test_a_path_is_no_url(tmp_path: Path, folder: str):
    """What would mean something in the URL that Optuna wants is part of the path, and no other file is written to."""
    place = tmp_path / folder
    store = LibraryStore.open(place / "library.db")
    assert store.add(RUN) == 3
    assert LibraryStore.open(earlier(place)).runs() == (RUN, OTHER)
    assert sorted(each.name for each in place.iterdir()) == ["library.db", "past.log"]
    assert [each.name for each in tmp_path.iterdir()] == [folder]


def test_a_journal_that_cannot_be_converted_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk: every later job would leave another half file on it."""
    path = earlier(tmp_path)
    before = path.read_bytes()

    def full(**_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(optuna, "copy_study", full)
    with pytest.raises(LibraryError, match="no space left"):
        LibraryStore.open(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["past.log"]


def test_a_torn_journal_loses_one_trial_and_goes_on(tmp_path: Path):
    """What a process that died while writing left in the journal can be read and added to."""
    path = earlier(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i in reversed(range(len(lines))) if b'"op_code":4' in lines[i] and b"run-1" in lines[i])
    path.write_bytes(b"".join(lines[: at + 1])[:-9])
    store = LibraryStore.open(path)
    assert store.runs()[0].trials == TRIALS[:2]
    assert store.add(RUN) == 1
    assert LibraryStore.open(path).runs() == (RUN,)


def test_what_is_no_library_stays_as_it_is(tmp_path: Path):
    """A file that was named by mistake is told, and not written to."""
    path = tmp_path / "runs.csv"
    path.write_text("threads,rows\n1,2\n")
    with pytest.raises(LibraryError, match=r"runs.csv cannot be used"):
        LibraryStore.open(path)
    assert path.read_text() == "threads,rows\n1,2\n"
    assert [each.name for each in tmp_path.iterdir()] == ["runs.csv"]


def test_a_process_that_is_killed_while_it_adds_loses_no_run(tmp_path: Path):
    """Those before it are there, and what it began can be added again."""
    path = tmp_path / "past.log"
    store = LibraryStore.open(path)
    store.add(OTHER)

    def add_many():
        own = LibraryStore.open(path)
        for number in range(10_000):
            own.add(run_of(measured(0, {"cpu": 1, "batch": 1}, rate=1.0), run_id=f"run-{number + 10}"))
            (tmp_path / f"added-{number}").touch()

    pid = forked(add_many)
    wait_for((tmp_path / "added-2").exists)
    killed(pid)
    runs = LibraryStore.open(path).runs()
    assert runs[0] == OTHER
    assert len(runs) >= 4
    assert LibraryStore.open(path).add(RUN) == 3


def test_a_place_that_can_not_be_opened_is_named(tmp_path: Path):
    """Nor written: the message names the place, but never a password."""
    with pytest.raises(LibraryError, match=r"library nosuch://\.\.\.@host/db cannot be used") as caught:
        LibraryStore.open("nosuch://me:secret@host/db")
    assert "secret" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(LibraryError, match=r"file/library.journal cannot be used"):
        LibraryStore.open(tmp_path / "file" / "library.journal")
    with pytest.raises(LibraryError, match=r"nowhere/library.jsonl"):
        write_library(tmp_path / "nowhere" / "library.jsonl", [RUN])
