"""What can go wrong with a refresh; either way the old version stays.

RefreshError
|-- BadUpdate      its maker must act: the update can never be applied
`-- NotPublished   the operator may retry: workers or files were not in the expected state
"""

from __future__ import annotations


class RefreshError(Exception):
    """Base class of both."""


class BadUpdate(RefreshError):
    """The update can never be applied.

    `field` names what is wrong: `update.json.base`, `rows.TABLE.ids`, `constants.NAME`.
    """

    def __init__(self, field: str, why: str) -> None:
        super().__init__(field, why)  # both, so that it can be pickled
        self.field = field
        self.why = why

    def __str__(self) -> str:
        return f"{self.field}: {self.why}"


class NotPublished(RefreshError):
    """The version was not published, or not to all workers."""
