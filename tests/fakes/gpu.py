"""A device that is not there: tensors of `gpux` have shapes, dtypes and a place, and no memory.

torch registers it as a device of its own, so whatever mixes places raises, as on a GPU. Values that the host reads back
say that all is well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpux"


class Allocator:
    """What torch asks a GPU's module for. `free`: what the device says; `reserved`: what torch keeps of the rest, of
    which tensors have `allocated`."""

    def __init__(self) -> None:
        self.total, self.reserved, self.allocated = 80 << 30, 0, 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False  # or other tests in this process would find a GPU

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.reserved, self.total

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def empty_cache(self) -> None:
        self.reserved = self.allocated


MEMORY = Allocator()
_setup_privateuseone_for_python_backend(NAME, backend_module=MEMORY)


class FakeGpu(FakeTensorMode):
    """Computes shapes and places of what is on the device; what is on the CPU is real, and zeros where it came from
    there."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._is_faking = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_faking:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = tree_leaves((args, kwargs))
        there = any(isinstance(each, FakeTensor) for each in given)
        if not there and not any(isinstance(each, torch.device) and each.type == NAME for each in given):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs or {}))
        return tree_map(_real, super().__torch_dispatch__(func, types, args, kwargs))

    def _faked(self, value: torch.Tensor) -> torch.Tensor:
        found = value
        if not isinstance(value, FakeTensor):
            self._is_faking = True
            found = self.from_tensor(value)
            self._is_faking = False
        found.constant = None  # torch would compute with what it knows of small ones, on a device that is not there
        return found


def _real(value: Any) -> Any:
    if isinstance(value, FakeTensor) and value.device.type == "cpu":
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def _apply(module: nn.Module, move: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` with new parameters: the ordinary one exchanges what fake tensors hold, which they refuse."""
    for child in module.children() if recurse else ():
        _apply(child, move)
    for name, value in [*module._parameters.items()]:
        if value is not None:
            module._parameters[name] = nn.Parameter(move(value.data), requires_grad=value.requires_grad)
    for name, value in [*module._buffers.items()]:
        module._buffers[name] = None if value is None else move(value)
    return module


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """The device, with modules that move to it as ordinary ones do."""
    with pytest.MonkeyPatch.context() as patch, FakeGpu() as mode:
        patch.setattr(nn.Module, "_apply", _apply)
        yield mode
