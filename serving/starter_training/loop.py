"""How long and how fast each stage trains (`FULL`: the one place with numbers to change), and the loop that all share:
AdamW, warm-up and cosine, weight average, resume.

The random numbers of step `i` depend only on the seed and `i`, so a run that was interrupted and resumed computes
the same as an uninterrupted one.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[int, torch.Generator], Tensor]
WARM_UP_STEPS = 50
SEED = 20
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


@dataclass(frozen=True, kw_only=True)
class StageOutcome:
    """The result of a stage: seconds of training so far, the last smoothed loss."""

    seconds_s: float
    loss: float


def learning_rate(step: int, recipe: StageRecipe) -> float:
    """Return the learning rate: linear warm-up, then half a cosine down to a fiftieth of the peak."""
    warm = min(1.0, (step + 1) / min(WARM_UP_STEPS, recipe.steps))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / recipe.steps)))
    return recipe.rate * warm * (0.02 + 0.98 * cosine)


class Trainer:
    """Trains the parameters of `module` that require a gradient, and keeps its progress in `path` (`STAGE.pt`)."""

    def __init__(self, module: nn.Module, recipe: StageRecipe, path: Path, *, save_every_s: float = 60.0) -> None:
        self.recipe, self.path, self.save_every_s = recipe, path, save_every_s
        self.module = module
        self.live = {key: value for key, value in module.named_parameters() if value.requires_grad}
        self.average = {key: value.detach().clone() for key, value in self.live.items()}
        self.optimiser = torch.optim.AdamW(
            list(self.live.values()), lr=recipe.rate, betas=(0.9, 0.99), weight_decay=1e-4
        )
        self.step, self.seconds_s, self.loss = 0, 0.0, float("nan")
        if path.exists():
            self._restore(torch.load(path, weights_only=True))

    def _restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for key, value in self.live.items():
                value.copy_(state["live"][key])
        self.average = state["average"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds_s, self.loss = state["step"], state["seconds_s"], state["loss"]

    def save(self) -> None:
        """Write the checkpoint so that a reader sees the old one or the new one, never a part."""
        state = {
            "live": {key: value.detach() for key, value in self.live.items()},
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds_s": self.seconds_s,
            "loss": self.loss,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.path)

    def _advance(self, loss: Loss) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.step, self.recipe)
        value = loss(self.step, torch.Generator().manual_seed(SEED * 1_000_003 + self.step))
        self.optimiser.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.live.values(), 1.0)
        self.optimiser.step()
        self.step += 1
        decay = min(self.recipe.ema, self.step / (self.step + 20))
        torch._foreach_lerp_(list(self.average.values()), [v.detach() for v in self.live.values()], 1 - decay)
        now = value.item()
        self.loss = now if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * now

    def run(self, loss: Loss) -> StageOutcome:
        """Train up to the recipe's steps, then put the averaged weights into the module and freeze it. A line of
        progress goes to stderr."""
        started = saved = time.monotonic()
        before_s, first = self.seconds_s, self.step
        while self.step < self.recipe.steps:
            self._advance(loss)
            now = time.monotonic()
            self.seconds_s = before_s + now - started
            if now - saved > self.save_every_s or self.step == self.recipe.steps:
                pace = (now - started) / (self.step - first)
                sys.stderr.write(
                    f"{self.path.stem} {self.step}/{self.recipe.steps} loss {self.loss:.4f} {self.seconds_s:.0f} s"
                    f" ({pace:.2f} s/step)\n"
                )
                self.save()
                saved = time.monotonic()
        with torch.no_grad():
            for key, value in self.average.items():
                self.live[key].copy_(value)
        self.module.requires_grad_(False).eval()
        return StageOutcome(seconds_s=self.seconds_s, loss=self.loss)
