"""The scores of placement as their formulas read, one node and one class at a time: what `FragmentTables` and
`ExpectedUse` are held against."""

from __future__ import annotations

from collections.abc import Sequence

from plait_deploy.placement.values import WHOLE, Task, TaskClass


def can_run(task: Task, cpu_milli: int, devices: Sequence[int], model: str) -> bool:
    """Whether the task fits a node with this much free; memory is no part of fragmentation."""
    if task.gpus and task.gpu_models and model not in task.gpu_models:
        return False
    return cpu_milli >= task.cpu_milli and sum(free >= task.gpu_milli for free in devices) >= task.gpus


def fragment(classes: Sequence[TaskClass], cpu_milli: int, devices: Sequence[int], model: str) -> int:
    """Return F of a node, in milli-GPUs times the sum of weights."""
    total = 0
    for each in classes:
        task = each.task
        if task.gpus and can_run(task, cpu_milli, devices, model):
            total += each.weight * sum(free for free in devices if free < task.gpu_milli)
        else:
            total += each.weight * sum(devices)
    return total


def gain(
    classes: Sequence[TaskClass], task: Task, cpu_milli: int, devices: Sequence[int], model: str
) -> tuple[int, int]:
    """Return F before minus F after placing the task on its best device, and that device (-1 if it is not a part)."""
    before = fragment(classes, cpu_milli, devices, model)
    if not task.is_share:
        left, wanted = list(devices), task.gpus
        for device, free in enumerate(left):
            if wanted and free == WHOLE:
                left[device], wanted = 0, wanted - 1
        return before - fragment(classes, cpu_milli - task.cpu_milli, left, model), -1
    best, at = -(1 << 62), -1
    for device, free in enumerate(devices):
        if free < task.gpu_milli:
            continue
        left = list(devices)
        left[device] -= task.gpu_milli
        gained = before - fragment(classes, cpu_milli - task.cpu_milli, left, model)
        if gained > best:
            best, at = gained, device
    return best, at


def device_value(
    classes: Sequence[TaskClass],
    steps: int,
    milli: int,
    *,
    grain: int,
    hurry: float,
    seen: dict[tuple[int, int], float],
) -> float:
    """Return V of `ExpectedUse` for one device with that many steps of CPU, in milli-GPUs. `hurry`: h; `seen` keeps
    what was computed before."""
    if (steps, milli) not in seen:
        weight = sum(each.weight for each in classes)
        gained, chance = 0.0, hurry
        for each in classes:
            task = each.task
            takes = max(1, -(-task.cpu_milli // grain))
            if task.gpus <= 1 and takes <= steps and task.gpu_milli <= milli:
                then = device_value(
                    classes, steps - takes, milli - task.gpu_milli, grain=grain, hurry=hurry, seen=seen
                )  # fmt: skip
                gained += each.weight / weight * (task.gpu_milli + then)
                chance += each.weight / weight
        seen[steps, milli] = gained / chance
    return seen[steps, milli]


def node_value(
    classes: Sequence[TaskClass], cpu_milli: int, devices: Sequence[int], *, grain: int, hurry: float, steps: int
) -> float:
    """Return the value of a node of `ExpectedUse` for one h, in milli-GPUs, where all classes may use its model."""
    weight, free, whole = sum(each.weight for each in classes), sum(devices), sum(each == WHOLE for each in devices)
    seen: dict[tuple[int, int], float] = {}
    total = 0.0
    for device in devices:
        share = min(steps, cpu_milli * device // (max(1, free) * grain))
        total += device_value(classes, share, device, grain=grain, hurry=hurry, seen=seen)
    for each in classes:
        if 1 < each.task.gpus <= whole and each.task.cpu_milli <= cpu_milli:
            total += each.weight / weight * WHOLE * whole
    return total
