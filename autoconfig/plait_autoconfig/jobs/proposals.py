"""The designer of a job, kept in sync with its records. It is rebuilt from them when a job is resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from plait_autoconfig.designers.base import Designer
from plait_autoconfig.errors import Exhausted, OutsideSpace
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config


class Proposals:
    """One worker's designer. Workers of a job share no memory: it learns of others' measurements through records."""

    def __init__(self, designer: Designer, spec: JobSpec) -> None:
        self._designer, self._spec = designer, spec
        self._reported: set[int] = set()

    def next(self, records: Sequence[Record]) -> Config | str:
        """Return a configuration that nobody has measured or is measuring, or why the search is over. It is asked for
        until it is claimed: then the records have it."""
        self._follow([record for record in records if record.kind.compares])
        if why := self._why_stop(records):
            return why
        try:
            return self._designer.ask()
        except Exhausted as error:
            return str(error)

    def _follow(self, records: Sequence[Record]) -> None:
        """Tell the designer what has finished since, and what is being measured now, by whomever."""
        for record in records:
            trial = None if record.number in self._reported else record.trial()
            if trial is not None:
                self._reported.add(record.number)
                with contextlib.suppress(OutsideSpace):  # the reference may lie outside: it says nothing about any cell
                    self._designer.tell(trial)
        self._designer.expect(record.config for record in records if record.status == "running")

    def _why_stop(self, records: Sequence[Record]) -> str:
        stop = self._spec.stop
        made = sum(record.kind is MeasurementKind.TRIAL and record.valid for record in records)
        if made < stop.least_trials or not stop.expected_gain:
            return ""
        regret = self._designer.expected_regret()
        said = f"the designer expects no more than {100.0 * regret:.2g} % to be left to gain"
        return said if regret < stop.expected_gain else ""
