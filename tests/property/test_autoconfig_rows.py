"""Random libraries through JSON lines: equal when whole, a true prefix when torn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait_autoconfig.library import LibraryRun
from plait_autoconfig.rows import dump_lines, load_lines
from plait_autoconfig.values import FailureKind, Hardware, Trial, TrialOutcome

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 2**60)
VALUE = st.booleans() | st.integers() | NUMBER | TEXT
OUTCOME = st.builds(TrialOutcome, metrics=st.dictionaries(TEXT, NUMBER, min_size=1, max_size=3)) | st.builds(
    TrialOutcome, failure=st.sampled_from(FailureKind), detail=TEXT
)
TRIAL = st.builds(
    Trial, number=COUNT, config=st.dictionaries(TEXT, VALUE, max_size=4), outcome=OUTCOME,
    duration_s=st.floats(0.0, 1e9), seed=st.integers(), repeat=COUNT,
)  # fmt: skip
RUN = st.builds(
    LibraryRun, run_id=TEXT.filter(bool), service=TEXT, trials=st.lists(TRIAL, max_size=3).map(tuple),
    units=st.dictionaries(TEXT, TEXT, max_size=2), workload=st.dictionaries(TEXT, NUMBER, max_size=2),
    hardware=st.builds(Hardware, name=TEXT, cpus=COUNT, memory_bytes=COUNT, accelerator=TEXT, accelerators=COUNT,
                       accelerator_memory_bytes=COUNT, price_per_hour=NUMBER),
    versions=st.dictionaries(TEXT, TEXT, max_size=2), goals=st.lists(TEXT, max_size=2).map(tuple),
    started_at=st.datetimes().map(lambda at: at.isoformat()),
)  # fmt: skip


@settings(max_examples=40)
@given(runs=st.lists(RUN, max_size=3, unique_by=lambda run: run.run_id), cut=st.integers(1, 200))
def test_lines_hold_every_library(runs, cut):
    """Whatever the texts and numbers are, reading gives what was written, kind by kind (1 is not True); torn, it gives
    the lines before."""
    text = "".join(f"{line}\n" for line in dump_lines(runs))
    assert repr(load_lines(text.splitlines())) == repr(tuple(runs))
    torn = text[:-cut]
    whole = load_lines(torn.splitlines())
    count = sum(1 + len(run.trials) for run in whole)
    assert count == torn.count("\n") + (torn.rpartition("\n")[2] in text.splitlines())
    for before, after in zip(runs, whole, strict=False):
        assert before.run_id == after.run_id
        assert before.trials[: len(after.trials)] == after.trials
