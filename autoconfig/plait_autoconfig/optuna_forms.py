"""What all uses of Optuna share: knobs as its distributions, and its log limited to warnings. Imported lazily, since
importing Optuna takes a second."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from plait_autoconfig.knobs import ChoiceKnob, IntKnob, Knob


def distribution_of(knob: Knob) -> BaseDistribution:
    """Return the same range or choices. Optuna cannot represent the order of an ordered choice."""
    if isinstance(knob, ChoiceKnob):
        return CategoricalDistribution(knob.values)
    if isinstance(knob, IntKnob):
        last = knob.low + (knob.high - knob.low) // knob.step * knob.step
        return IntDistribution(knob.low, last, log=knob.log, step=knob.step)
    last_value = knob.high if knob.count is None else float(knob.value_at(knob.count - 1))
    return FloatDistribution(knob.low, last_value, log=knob.log, step=knob.step)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna, which would announce each study that it creates."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
