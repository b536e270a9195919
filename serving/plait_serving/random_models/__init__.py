"""Models of published architectures with random weights: what they cost to serve can be measured without a download."""

from __future__ import annotations

from enum import StrEnum


class DtypeName(StrEnum):
    """The dtype that weights are stored in."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class LoraSpelling(StrEnum):
    """Whose layers and key names a LoRA file has."""

    PEFT = "peft"
    KOHYA = "kohya"
