"""Measurements of one's own become a run of the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait_autoconfig.errors import LibraryError
from plait_autoconfig.importing import CsvMap, read_csv, read_map
from plait_autoconfig.values import FailureKind

CSV = "max-num-seqs,dtype,p99 (s),rate,died\n8,bf16,0.2,10,\n8,bf16,0.3,12,\n16,fp32,,,out of memory\n"
MAP = """\
service: my-llm
knobs: {max_num_seqs: max-num-seqs, dtype: dtype}
metrics: {goodput_per_s: rate, p99_ms: {column: p99 (s), times: 1000}}
failed: died
goals: [max goodput_per_s]
"""


def files(folder: Path, text: str = CSV, mapped: str = MAP) -> tuple[Path, CsvMap]:
    """Both files, the map read."""
    (folder / "runs.csv").write_text(text)
    (folder / "map.yaml").write_text(mapped)
    return folder / "runs.csv", read_map(folder / "map.yaml")


def test_rows_become_trials(tmp_path: Path):
    """Numbers are numbers, units are converted, equal rows are repeats, and failures stay failures."""
    run = read_csv(*files(tmp_path))
    assert [dict(trial.config) for trial in run.trials[::2]] == [
        {"max_num_seqs": 8, "dtype": "bf16"}, {"max_num_seqs": 16, "dtype": "fp32"}
    ]  # fmt: skip
    assert [trial.repeat for trial in run.trials] == [0, 1, 0]
    assert run.trials[0].outcome.metrics == {"goodput_per_s": 10.0, "p99_ms": 200.0}
    assert run.trials[2].outcome.failure is FailureKind.CRASH
    assert run.run_id == read_csv(*files(tmp_path)).run_id


@pytest.mark.parametrize(
    ("text", "mapped", "said"),
    [
        ("a,b\n1,2\n", MAP, "has no column 'max-num-seqs'; it has a, b"),
        ("", MAP, "it has no rows"),
        (CSV.replace("0.2", "fast"), MAP, r"line 2: p99 \(s\) is 'fast', which is no number"),
        (CSV.replace("0.2", "nan"), MAP, "line 2: .* which is no measurement"),
        (CSV.replace("died", "rate"), MAP.replace("failed: died", ""), "has 2 columns 'rate'"),
        (CSV.replace("0.3", "0,3"), MAP, "line 3: it has more fields than the header"),
        (CSV.replace("\n8,bf16,0.3", "\n\n8,bf16,fast"), MAP, "line 4: p99"),
        (CSV.replace("\n16", "\nNaN"), MAP, "line 4: NaN is no value of a knob"),
        (CSV, MAP + "sets: {dtyp: engine.dtype}\n", "units and sets: dtyp is no knob; they are max_num_seqs, dtype"),
        (CSV, MAP + "cake: 1\n", "cake: there is no such setting"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, mapped: str, said: str):
    """With the file and the column, the line or the key."""
    with pytest.raises(LibraryError, match=said):
        read_csv(*files(tmp_path, text, mapped))
