"""The designer of a job, kept in sync with its records. It is rebuilt from them when a job is resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence

from plait_autoconfig.designers.base import Designer
from plait_autoconfig.errors import Exhausted, OutsideSpace
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config, config_key


class Proposals:
    """One worker's designer. Workers of a job share no memory: it learns of others' measurements through records."""

    def __init__(self, designer: Designer, spec: JobSpec) -> None:
        self._designer, self._spec = designer, spec
        self._reported: set[int] = set()
        self._asked: dict[Hashable, Config] = {}

    def follow(self, records: Sequence[Record]) -> None:
        """Tell the designer what has finished since, and drop what was lost."""
        for record in records:
            if record.number in self._reported or record.status == "running" or not record.kind.compares:
                continue
            self._reported.add(record.number)
            config, trial = self._asked.pop(record.key, None), record.trial()
            if trial is not None:
                with contextlib.suppress(OutsideSpace):  # the reference may lie outside: it says nothing about any cell
                    self._designer.tell(trial)
            elif config is not None:
                self._designer.drop(config)

    def next(self, records: Sequence[Record]) -> Config | str:
        """Return a configuration that nobody has measured or is measuring, or why the search is over.

        Returns the same one until it is claimed, by us or another worker.
        """
        self.follow(records)
        taken = {record.key for record in records if _takes(record)}
        for key, config in self._asked.items():
            if key not in taken:
                return config
        if why := self._why_stop(records):
            return why
        try:
            while True:
                config = self._designer.ask()
                key = config_key(config)
                self._asked[key] = config
                if key not in taken:
                    return config
        except Exhausted as error:
            return str(error)

    def _why_stop(self, records: Sequence[Record]) -> str:
        stop = self._spec.stop
        made = sum(record.kind is MeasurementKind.TRIAL and record.valid for record in records)
        if made < stop.least_trials or not stop.expected_gain:
            return ""
        regret = self._designer.expected_regret()
        said = f"the designer expects no more than {100.0 * regret:.2g} % to be left to gain"
        return said if regret < stop.expected_gain else ""


def _takes(record: Record) -> bool:
    """Return whether a record keeps its configuration from being proposed."""
    return record.kind is MeasurementKind.TRIAL and (record.status == "running" or record.valid)
