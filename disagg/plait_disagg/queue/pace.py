"""How long batches take, learned from those that ran. Pure: measurements are passed in.

The model is a line, `fixed_s + rows * row_s`: a batch of one row costs nearly as much as one of ten, so seconds per
row alone would predict far too much delay for requests that wait together and are computed together. The line is
fitted by least squares with forgetting: a batch's weight shrinks by `_FORGET` with every later one.
"""

from __future__ import annotations

_FORGET = 31 / 32
"""The weight that a batch keeps with each later one. The last 22 batches hold half of the total weight: some tens of
milliseconds under load."""

_SURPRISE = 4.0
"""A batch's time is clamped to this multiple of its forecast: one stall of the machine must not cause a second's
worth of requests to be refused. If batches really have become slower, each one raises the forecast, which catches
up in a few steps."""

_SPREAD = 0.05
"""The min spread of batch sizes, as a share of the mean number of rows: batches that differ less carry no
information about the slope."""

_MIN_MARGIN, _MAX_MARGIN = 1.25, 3.0
"""How much longer than forecast an answer may take. In simulated overload (up to four times the capacity, batch times
that vary by half) goodput keeps 90 % of its peak from 1.2 on; 1.0 loses a third."""

_LATE, _IN_TIME = 1.1, 0.99
"""The factors by which a late and a timely end of a request change the margin. About one late answer in ten leaves
it unchanged: where times vary more than in the simulation, such as on shared cores, requests that would be late
anyway are soon refused."""

_MAX_ROWS = 1 << 31
"""The max rows when rows cost nothing."""


class Pace:
    """A forecast of batch times. Not locked: one thread records batches, another answers.

    All may read; they see a forecast that may be one batch old.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0
        self._fixed_s = self._row_s = 0.0
        self.after_s = 0.0
        self.margin = _MIN_MARGIN

    def batch_s(self, rows: float) -> float:
        """Return how long a batch of `rows` occupies the worker; 0 before anything is known, which rejects nothing."""
        return self._fixed_s + rows * self._row_s

    def rows_within(self, seconds: float) -> int:
        """Return the max rows of a batch that takes at most `seconds`, or twice its fixed cost; at least 1."""
        left_s = max(self._fixed_s, seconds - self._fixed_s)
        return _MAX_ROWS if left_s >= _MAX_ROWS * self._row_s else max(1, int(left_s / self._row_s))

    def saw_batch(self, rows: int, seconds: float) -> None:
        """Record that a batch of `rows` occupied the worker for `seconds`."""
        if self._weight > 1.0:
            seconds = min(seconds, _SURPRISE * self.batch_s(rows))
        self._weight = _FORGET * self._weight + 1.0
        self._rows = _FORGET * self._rows + rows
        self._seconds = _FORGET * self._seconds + seconds
        self._rows_rows = _FORGET * self._rows_rows + rows * rows
        self._rows_seconds = _FORGET * self._rows_seconds + rows * seconds
        self._fit()

    def saw_answer(self, seconds: float) -> None:
        """Record that the answer to a batch arrived `seconds` after it had left this worker (a CN's HN)."""
        if self.after_s:
            self.after_s += (min(seconds, _SURPRISE * self.after_s) - self.after_s) / 8
        else:
            self.after_s = seconds

    def saw_end(self, *, in_time: bool) -> None:
        """Record that an accepted request with a deadline was answered, or that nobody is waiting for it any more."""
        self.margin = min(_MAX_MARGIN, max(_MIN_MARGIN, self.margin * (_IN_TIME if in_time else _LATE)))

    def _fit(self) -> None:
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_rows / self._weight - mean_rows * mean_rows
        slope = self._row_s
        if spread > (_SPREAD * mean_rows) ** 2:
            slope = max(0.0, (self._rows_seconds / self._weight - mean_rows * mean_s) / spread)
        self._row_s = min(slope, mean_s / mean_rows)  # a batch of no rows takes no less than nothing
        self._fixed_s = mean_s - self._row_s * mean_rows
