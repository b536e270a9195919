"""Single operators at the sizes of real models: their time beside that of a plain copy of as many bytes.

Without a GPU it measures the CPU forms, in fp32. Calls go round over several sets of inputs, more than the last cache
holds, so that each reads memory; on a GPU they are captured in a CUDA graph, so that launches do not count. `python -m
plait_bench.gpu` runs it where only torch, Triton and plait's kernels are installed.

Sizes are those of guided denoising, two rows: SDXL at 1024x1024, Stable Diffusion 1.5 at 512x512.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from typing import Any

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from plait_bench.benchmark import Reading, Say, Subject, Workload, readings, selected
from plait_bench.errors import Disagreement, SystemUnavailable
from plait_kernels.devices import default_device
from plait_kernels.executors.cuda_capture import CudaCapture
from plait_kernels.int8_lookup import SCALE_AND_BIAS_BYTES
from plait_kernels.lora_merge import Term
from plait_kernels.registry import load

PLAIT, EAGER, COMPILED, COPY, FBGEMM = "plait", "eager", "torch.compile", "copy", "fbgemm"

Arguments = tuple[Any, ...]
Call = Callable[[], None]
Form = Callable[..., object]
Make = Callable[[str, torch.dtype], Arguments]

_TOLERANCE = 4e-2
"""Largest difference between systems, relative to the largest value: they round to the dtype at different places."""
_ROUND_S = 0.05
_COLD_BYTES = 512 << 20
"""Bytes of all sets together: several times the L2 cache of a large GPU."""
_MAX_SETS = 64

_SDXL_NORMS = [(320, 128), (960, 128), (640, 64), (1920, 64), (1280, 32), (2560, 32)]
_SD15_NORMS = [(320, 64), (640, 32), (1280, 16), (2560, 8)]
_SDXL_GEGLUS = [(4096, 2560), (1024, 5120)]  # (tokens, D)
_SD15_GEGLUS = [(4096, 1280), (1024, 2560), (256, 5120)]
_ROWS, _GROUPS = 2, 32
_RANK, _TERMS, _MERGED_WIDTH = 16, 2, 1280
_TABLE_ROWS, _TABLE_WIDTH = 4_000_000, 64  # 1 GB of float32, 288 MB of int8
_BLOCK_ROWS = 65_536
_LOOKUPS = ((64, 20), (512, 80), (2048, 40))  # (bags, ids in each): RM3, RM1's, and a batch of many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorCase:
    """An operator at one size, what plait computes it with, and what eager torch (diffusers) does.

    `moved` counts what an operator must read and write, in elements of the dtype, each once. `make(device, dtype)`
    gives the arguments of one call. `others` make further forms, by system; they raise `SystemUnavailable`. `compiles`:
    whether torch.compile takes part.
    """

    name: str
    moved: int
    make: Make
    plait: Form
    eager: Form
    others: Mapping[str, Callable[[], Form]] = field(default_factory=dict)
    compiles: bool = True


def cases(device: str) -> list[OperatorCase]:
    """Return all cases; on a CPU a size of each, and those that only a CPU has."""
    small = device == "cpu"
    norms = [("sdxl", size) for size in _SDXL_NORMS] + [("sd15", size) for size in _SD15_NORMS]
    geglus = [("sdxl", size) for size in _SDXL_GEGLUS] + [("sd15", size) for size in _SD15_GEGLUS]
    found = [_geglu(model, *size) for model, size in geglus[: 1 if small else None]]
    found += [_norm(model, *size) for model, size in (norms[2:3] if small else norms)]
    found += [_residuals("sdxl", *size) for size in ((640, 64), (320, 128))[: 1 if small else 2]]
    found += [_norm(model, *size, bare=True) for model, size in ([] if small else norms[2:5:2])]
    return found + ([_merge(_MERGED_WIDTH), *(_lookup(*size) for size in _LOOKUPS)] if small else [])


def _geglu(model: str, tokens: int, width: int) -> OperatorCase:
    def eager(x: torch.Tensor) -> object:
        hidden, gate = x.chunk(2, dim=-1)
        return hidden * functional.gelu(gate)

    return OperatorCase(
        name=f"geglu-{model}-{tokens}x{width}",
        moved=3 * _ROWS * tokens * width,
        make=lambda device, dtype: (torch.randn(_ROWS, tokens, 2 * width, device=device, dtype=dtype),),
        plait=lambda x: load("geglu", x.device.type, x.dtype)(x),
        eager=eager,
    )


def _norm(model: str, channels: int, edge: int, *, bare: bool = False) -> OperatorCase:
    """ResnetBlock2D's second half: time embedding, norm, SiLU. `bare`: Transformer2DModel's norm, nothing before it or
    after it."""

    def make(device: str, dtype: torch.dtype) -> Arguments:
        x = torch.randn(_ROWS, channels, edge, edge, device=device, dtype=dtype).to(memory_format=torch.channels_last)
        vectors = [(channels,), (channels,), (_ROWS, channels)][: 2 if bare else 3]
        return x, *(torch.randn(shape, device=device, dtype=dtype) for shape in vectors)

    def plait(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *time: torch.Tensor) -> object:
        op = load("group_norm_silu", x.device.type, x.dtype)
        return op(x, _GROUPS, weight, bias, 1e-5, **({"silu": False} if bare else {"addend": time[0]}))

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *time: torch.Tensor) -> object:
        if bare:
            return functional.group_norm(x, _GROUPS, weight, bias, 1e-5)
        return functional.silu(functional.group_norm(x + time[0][:, :, None, None], _GROUPS, weight, bias, 1e-5))

    return OperatorCase(
        name=f"group-norm-{'' if bare else 'silu-'}{model}-{channels}x{edge}",
        moved=2 * _ROWS * channels * edge * edge,
        make=make,
        plait=plait,
        eager=eager,
    )


def _residuals(model: str, channels: int, edge: int) -> OperatorCase:
    """Three ControlNets on one skip, as the engine adds them to all skips of a request."""

    def make(device: str, dtype: torch.dtype) -> Arguments:
        shape = (_ROWS, channels, edge, edge)
        skip, *residuals = (
            torch.randn(shape, device=device, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(4)
        )
        return skip, [residual * 0.01 for residual in residuals]

    def plait(skip: torch.Tensor, residuals: list[torch.Tensor]) -> object:
        torch._foreach_add_([skip], [reduce(torch.add, residuals)])
        return skip

    def eager(skip: torch.Tensor, residuals: list[torch.Tensor]) -> object:
        skip += residuals[0] + residuals[1] + residuals[2]
        return skip

    return OperatorCase(
        name=f"residual-add-{model}-{channels}x{edge}",
        moved=5 * _ROWS * channels * edge * edge,
        make=make,
        plait=plait,
        eager=eager,
    )


def _merge(width: int) -> OperatorCase:
    """A LoRA set merged into a large weight of Stable Diffusion 1.5. Eager: LoRA after LoRA is added to a copy, all of
    which is then looked at (peft's `merge` with `safe_merge`)."""

    def make(device: str, dtype: torch.dtype) -> Arguments:
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype) * 0.01

        weight = drawn(width, width)
        ups, downs = ([drawn(*shape) for _ in range(_TERMS)] for shape in ((width, _RANK), (_RANK, width)))
        return weight, weight.clone(), ups, downs

    def plait(weight: torch.Tensor, own: torch.Tensor, ups: list[torch.Tensor], downs: list[torch.Tensor]) -> object:
        terms = [Term(up=up, down=down, c=0.5) for up, down in zip(ups, downs, strict=True)]
        load("lora_merge", weight.device.type, weight.dtype)(weight, own, terms)
        return weight

    def eager(weight: torch.Tensor, own: torch.Tensor, ups: list[torch.Tensor], downs: list[torch.Tensor]) -> object:
        total = own.clone()
        for up, down in zip(ups, downs, strict=True):
            total += (up @ down) * 0.5
        assert torch.isfinite(total).all()
        return weight.copy_(total)

    return OperatorCase(
        name=f"lora-merge-sd15-{width}",
        moved=2 * width * width,
        make=make,
        plait=plait,
        eager=eager,
        compiles=False,
    )


def _lookup(bags: int, ids: int) -> OperatorCase:
    """Pooled lookups in a table that no cache holds: int8 rows, beside float32 rows (eager) and fbgemm's int8 rows."""
    stored = _TABLE_WIDTH + SCALE_AND_BIAS_BYTES
    return OperatorCase(
        name=f"int8-lookup-{bags}x{ids}",
        moved=(bags * ids * (stored + 8) + 4 * bags * _TABLE_WIDTH) // 4,
        make=lambda *_: (torch.randint(_TABLE_ROWS, (bags * ids,)), torch.arange(0, bags * ids + 1, ids)),
        plait=lambda ids, offsets: load("int8_lookup", "cpu", torch.float32)(_stored(), ids, offsets),
        eager=lambda ids, offsets: torch.embedding_bag(_table(), ids, offsets, False, 0, False, None, True)[0],
        others={FBGEMM: _fbgemm},
        compiles=False,
    )


@lru_cache(maxsize=1)
def _table() -> torch.Tensor:
    """Return the rows as float32. The first are drawn, then repeated."""
    block = torch.empty(_BLOCK_ROWS, _TABLE_WIDTH).uniform_(-1, 1)
    return block.repeat(-(-_TABLE_ROWS // _BLOCK_ROWS), 1)[:_TABLE_ROWS]


@lru_cache(maxsize=1)
def _stored() -> torch.Tensor:
    """Return the same rows as int8 with scale and bias."""
    parts = [torch.ops.quantized.embedding_bag_byte_prepack(part) for part in torch.split(_table(), _BLOCK_ROWS)]
    return torch.cat(parts)


@lru_cache(maxsize=1)
def _fbgemm() -> Form:
    """Return fbgemm's inference operator over the same rows; its scale and bias are float16.

    Raises `SystemUnavailable`: it is no dependency; `pip install --no-deps fbgemm-gpu-cpu` of torch's version adds it.
    """
    try:
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
    except (ImportError, OSError) as error:
        raise SystemUnavailable(f"{FBGEMM}: {error}") from error
    made: Any = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("table", _TABLE_ROWS, _TABLE_WIDTH, SparseType.INT8, EmbeddingLocation.HOST)],
        device="cpu", pooling_mode=PoolingMode.SUM, output_dtype=SparseType.FP32, row_alignment=1,
    )  # fmt: skip
    made.initialize_weights()
    ((rows, scales),) = made.split_embedding_weights()
    stored = _stored()
    rows.copy_(stored[:, :_TABLE_WIDTH])
    scales.copy_(stored[:, _TABLE_WIDTH:].contiguous().view(torch.float32).half().view(torch.uint8))
    return lambda ids, offsets: made(ids.int(), offsets.int())


class DeviceTimer:
    """Seconds per call of a list of calls, each on inputs of its own, by the wall clock."""

    def __init__(self, device: str) -> None:
        self.device, self.on_gpu = device, device == "cuda"
        self.dtype = torch.float16 if self.on_gpu else torch.float32
        self.name = f"{torch.cuda.get_device_name()}, float16" if self.on_gpu else "CPU, float32"

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Call:
        """Return one call that makes them all; on a GPU it is captured in a CUDA graph."""

        def run() -> None:
            for call in calls:
                call()

        return CudaCapture(torch.device(self.device))(run).replay if self.on_gpu else run

    def sets(self, nbytes: int) -> int:
        """Return how many sets of inputs make every call read memory, given the bytes that one call moves."""
        return max(2, min(_MAX_SETS, -(-_COLD_BYTES // nbytes)))

    def per_call_s(self, run: Call, calls: int) -> float:
        """Return the seconds of one of the `calls` that `run` makes, over about a twentieth of a second; the device's
        work is included."""
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=_ROUND_S).mean / calls


class OperatorWorkload(Workload):
    """All systems on one case."""

    metrics: Mapping[str, str] = {"time_us": "us"}

    def __init__(self, case: OperatorCase, clock: DeviceTimer) -> None:
        self.name = case.name
        self._case, self._clock = case, clock
        compiled = (COMPILED,) if case.compiles and _compiles(clock.device) else ()
        self.systems = (PLAIT, EAGER, *compiled, *case.others, COPY)
        self._answers: dict[str, Callable[[], torch.Tensor]] = {}

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Make the inputs of all systems but the copy."""
        with torch.inference_mode():
            self._sets = self._drawn(self._case.make)
            yield
        self._sets.clear()
        self._answers.clear()

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Capture the calls of the form."""
        form, sets = self._form(system), self._drawn(copied(self._case.moved)) if system == COPY else self._sets
        run = self._clock.prepare([partial(form, *given) for given in sets])
        self._answers[system] = partial(_answer, form, sets[0])
        yield Subject(lambda _: self._timed(run, len(sets)), warm_up=run)

    def check(self, subjects: Mapping[str, Subject]) -> None:
        """Compare the forms' results. Raises `Disagreement`."""
        answers = {name: self._answers[name]() for name in subjects if name != COPY}
        if (reference := answers.get(EAGER)) is not None:
            for name, answer in answers.items():
                error = float((answer - reference).abs().max() / reference.abs().max())
                if not error <= _TOLERANCE:
                    raise Disagreement(f"{self.name}: {name} differs from {EAGER} by {error:.2g} of the largest value")

    def _timed(self, run: Call, calls: int) -> list[Reading]:
        return readings({"time_us": self._clock.per_call_s(run, calls) * 1e6}, layout=self._clock.name)

    def _form(self, system: str) -> Form:
        if system in self._case.others:
            return self._case.others[system]()
        if system == COMPILED:
            torch.compiler.reset()  # else sizes of one function would share its few places for compiled code
            compiled: Form = torch.compile(self._case.eager, dynamic=False)
            return compiled
        return {PLAIT: self._case.plait, EAGER: self._case.eager, COPY: torch.clone}[system]

    def _drawn(self, make: Make) -> list[Arguments]:
        """Return several sets of inputs."""
        count = self._clock.sets(self._case.moved * self._clock.dtype.itemsize)
        return [make(self._clock.device, self._clock.dtype) for _ in range(count)]


def _answer(form: Form, given: Arguments) -> torch.Tensor:
    """Return the result on copies: some operators write in place."""
    result = form(*[each.clone() if isinstance(each, torch.Tensor) else [it.clone() for it in each] for each in given])
    assert isinstance(result, torch.Tensor)
    return result.float()


def copied(moved: int) -> Make:
    """Return what makes the argument of a copy that moves as many elements: half are read, half are written."""
    return lambda device, dtype: (torch.randn(math.ceil(moved / 2), device=device, dtype=dtype),)


def _compiles(device: str) -> bool:
    """Return whether torch.compile has what it needs: Triton comes with torch for a GPU; a CPU needs a compiler."""
    return device == "cuda" or any(shutil.which(name) for name in ("g++", "clang++"))


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark of all cases, or of those named. Raises `BenchError`."""
    clock = DeviceTimer(default_device())
    return selected([OperatorWorkload(case, clock) for case in cases(clock.device)], only)
