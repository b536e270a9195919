"""How long and how fast each stage trains: the one place with numbers to change."""

from __future__ import annotations

from dataclasses import dataclass, replace

STAGES = ("vae", "decoder", "text", "base", "edges", "colors", "noto", "sketch", "pixel")


@dataclass(frozen=True, kw_only=True)
class StageRecipe:
    """One stage: optimizer steps, images per step, peak learning rate, decay of the weight average."""

    steps: int
    batch: int
    rate: float
    ema: float = 0.995

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or self.rate <= 0 or not 0 <= self.ema < 1:
            raise ValueError(f"impossible recipe: {self}")


Plan = dict[str, StageRecipe]

FULL: Plan = {
    "vae": StageRecipe(steps=1450, batch=16, rate=2e-3),
    "decoder": StageRecipe(steps=600, batch=12, rate=1.2e-3),
    "text": StageRecipe(steps=1200, batch=48, rate=2e-3, ema=0.98),
    "base": StageRecipe(steps=3000, batch=16, rate=1.5e-3),
    "edges": StageRecipe(steps=1150, batch=16, rate=1e-3),
    "colors": StageRecipe(steps=600, batch=16, rate=1e-3),
    "noto_text": StageRecipe(steps=500, batch=48, rate=3e-3, ema=0.98),
    "noto": StageRecipe(steps=350, batch=16, rate=1.5e-3),
    "sketch_text": StageRecipe(steps=400, batch=48, rate=3e-3, ema=0.98),
    "sketch": StageRecipe(steps=250, batch=16, rate=1.5e-3),
    "pixel_text": StageRecipe(steps=200, batch=48, rate=3e-3, ema=0.98),
    "pixel": StageRecipe(steps=200, batch=16, rate=1.5e-3),
}


def smoke_plan(steps: int = 3) -> Plan:
    """Return a plan of a few steps per stage: it proves that the program runs, not that it learns."""
    return {name: replace(recipe, steps=steps, batch=2, ema=0.5) for name, recipe in FULL.items()}


def override(plan: Plan, settings: list[str]) -> Plan:
    """Return a new plan with `stage.field=value` settings applied. Raises ValueError for an unknown stage or field."""
    changed = dict(plan)
    for setting in settings:
        key, _, value = setting.partition("=")
        stage, _, field = key.partition(".")
        if stage not in changed or field not in ("steps", "batch", "rate", "ema") or not value:
            raise ValueError(f"expected <stage>.<steps|batch|rate|ema>=<number>, got {setting!r}")
        number = type(getattr(changed[stage], field))(value)
        changed[stage] = replace(changed[stage], **{field: number})
    return changed
