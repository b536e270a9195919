"""Designers, which propose the next trial. One base (`base.Designer`), one conformance suite
(`tests/suites/designers.py`).

Adding a designer takes a line in `_MAKERS`, by which the suite finds it. Modules are imported when a designer is made,
because some need torch or Optuna.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from plait_autoconfig.errors import DesignerError, hint

if TYPE_CHECKING:
    from plait_autoconfig.designers.base import Designer

_MAKERS = {
    "random": "base:RandomDesigner",
    "grid": "base:GridDesigner",
    "sobol": "base:SobolDesigner",
    "optuna-tpe": "optuna_samplers:OptunaTpeDesigner",
    "optuna-gp": "optuna_samplers:OptunaGpDesigner",
    "plait": "plait_designer:PlaitDesigner",
}

DESIGNERS = tuple(_MAKERS)
"""The names that `maker_of` accepts."""


def maker_of(name: str) -> type[Designer]:
    """Return a designer; takes seconds if its modules are not imported yet. Raises as `check_name`."""
    check_name(name)
    return cast("type[Designer]", resolve_name(f"{__name__}.{_MAKERS[name]}"))


def check_name(name: str) -> None:
    """Raise `DesignerError` for an unknown name."""
    if name not in DESIGNERS:
        raise DesignerError(f"there is no designer {name!r}; {hint(name, DESIGNERS)}")
