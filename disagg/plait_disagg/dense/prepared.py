"""What a dense half is prepared to: programs on a CPU, graphs on a GPU.

Torch serves every batch until a program was tried and found equal and faster.

A half never changes its weights (an update makes another half), and its programs are made from its own: what an update
replaces cannot be computed with the weights of before.

Only what is proven equal is tried at all (`proven`), and a program's answers are audited for as long as it is used: its
first batch and then one in `_AUDIT_EVERY` are computed by torch, too. One that differs is answered by torch, as
everything is from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from plait_disagg.dense.proven import unproven
from plait_disagg.dense.trial import (
    TOLERANCE,
    Bucket,
    Given,
    bucket_of,
    difference,
    filled_up,
    medians,
    noise_like,
    pays_from,
    resized,
)
from plait_disagg.graph.execute import Compiled
from plait_disagg.graph.program import ROWS, Node, Port
from plait_kernels.executors import Computation, ExecutorError, InputSpec, PreparedProgram, background
from plait_kernels.executors.graphs import GraphMemory, GraphProgram
from plait_kernels.executors.openvino_executor import OpenVinoSettings, available
from plait_kernels.threads import lower_priority, set_threads

_log = logging.getLogger(__name__)

_CALLS_BEFORE_TRYING = 3
_AUDIT_EVERY = 1000
"""Of these batches of a program one is audited. It takes torch's time more, a thousandth of what torch would take."""

REST = 9.0
"""A trial is followed by a rest of so many times its length: trials take a tenth of a core from what is served."""

_MAX_BUCKETS = 64
_MAX_BYTES = 1 << 30
_MAX_BYTES_OF_ONE = 1 << 28


@dataclass(slots=True)
class Trust:
    """What was found out about a dense half's programs; the halves of its updates share it.

    `checked` batches were audited, of which `drifted` differed. `refused`: why torch computes everything, or "".
    """

    checked: int = 0
    drifted: int = 0
    refused: str = ""


@dataclass(slots=True)
class _Choice:
    """What computes a bucket: `program` from `from_rows` rows on, torch below and where there is none. `batches`: how
    many the program has computed."""

    program: PreparedProgram | None = None
    from_rows: int = 0
    bytes: int = 0
    batches: int = 0


class DensePrograms:
    """Prepared programs of `compiled`, whose constants are on the CPU, by bucket."""

    def __init__(
        self,
        compiled: Compiled,
        trust: Trust | None = None,
        *,
        start: Callable[[str, Callable[[], None]], object] = background.start,
        clock: Callable[[], float] = time.monotonic,
        max_buckets: int = _MAX_BUCKETS,
        max_bytes_of_one: int = _MAX_BYTES_OF_ONE,
    ) -> None:
        """Prepare nothing yet: what recurs is prepared, on threads that `start` starts, one after the other. `trust`:
        that of the half before an update. The programs of `max_buckets` are kept, each of at most `max_bytes_of_one`
        bytes."""
        self._compiled = compiled
        self.trust = Trust() if trust is None else trust
        self._ports = compiled.program.inputs
        self._names = tuple(port.name for port in self._ports)
        self._outputs = tuple(name for name, _ in compiled.program.outputs)
        self._start = start
        self._clock = clock
        self._max_buckets, self._max_bytes_of_one = max_buckets, max_bytes_of_one
        self._next_try_s = float("-inf")
        self._choices: OrderedDict[Bucket, _Choice] = OrderedDict()
        self._seen: dict[Bucket, int] = {}
        self._converted: dict[bool, object] = {}
        self._trying = False
        self.batches = 0
        if not available():
            self.trust.refused = "openvino is not installed"
        elif not self.trust.refused and (reason := unproven(compiled)):
            self._give_up(reason, logging.INFO)

    def run(self, given: Given, users: int, rows: int) -> dict[str, torch.Tensor] | None:
        """Return the outputs of a batch, or None where torch is to compute them."""
        if self.trust.refused:
            return None
        bucket = bucket_of(users, rows, torch.get_num_threads())
        choice = self._choices.get(bucket)
        if choice is None:
            self._saw(bucket, given)
            return None
        if choice.program is None or rows < choice.from_rows:
            return None
        try:
            made = choice.program.run([given[name] for name in self._names])
        except Exception as error:
            self._give_up(error)
            return None
        if rows != bucket.rows:
            made = tuple(value[:rows] for value in made)
        answer = dict(zip(self._outputs, made, strict=True))
        if choice.batches % _AUDIT_EVERY == 0:
            wanted = self._compiled(given)
            if not self._agrees(answer, wanted, rows):
                return wanted
        choice.batches += 1
        self.batches += 1
        return answer

    def _agrees(self, answer: Given, wanted: Given, rows: int) -> bool:
        """Audit a batch; return whether the program computed what torch did."""
        self.trust.checked += 1
        found = difference(answer, wanted)
        if found <= TOLERANCE:
            return True
        self.trust.drifted += 1
        self._give_up(f"an audit of {rows} rows found openvino off by {found:.2g}", logging.ERROR)
        return False

    def _saw(self, bucket: Bucket, given: Given) -> None:
        """Count a bucket's calls; try a program once it recurs and no other is being tried."""
        calls = self._seen[bucket] = self._seen.get(bucket, 0) + 1
        if calls < _CALLS_BEFORE_TRYING or self._trying:
            return
        if self._clock() < self._next_try_s or background.is_ending():
            return
        with torch.inference_mode(mode=False):  # copies that may be traced; what crossed belongs to its message
            example = {name: given[name].clone() for name in self._names}
        self._trying = True
        self._start("plait-dense", partial(self._try, bucket, example))

    def _give_up(self, reason: Exception | str, level: int = logging.WARNING) -> None:
        """Leave everything to torch from now on."""
        self.trust.refused = " ".join(str(reason).split())[:300]
        self._choices.clear()
        self._converted.clear()
        _log.log(level, "the dense half runs on torch: %s", self.trust.refused)

    # On the thread of a trial, which ends with it.

    def _try(self, bucket: Bucket, example: Given) -> None:
        began_s = self._clock()
        try:
            set_threads(bucket.threads)
            lower_priority()
            with torch.inference_mode():
                self._keep(bucket, self._chosen(bucket, example))
        except Exception as error:
            self._give_up(error)
        finally:
            self._seen.pop(bucket, None)
            now_s = self._clock()
            self._next_try_s = now_s + REST * (now_s - began_s)
            self._trying = False

    def _chosen(self, bucket: Bucket, example: Given) -> _Choice:
        nbytes = _bytes_of(self._compiled.program.nodes, bucket) + self._compiled.constant_bytes
        if nbytes > self._max_bytes_of_one:
            return _Choice()
        smallest = resized(self._ports, example, bucket.fewest_users, bucket.fewest_rows)
        largest = resized(self._ports, example, bucket.users, bucket.rows)
        program = self._program(bucket, largest)
        for probe in (smallest, largest, noise_like(smallest), noise_like(largest, seed=1)):
            rows = next(len(probe[port.name]) for port in self._ports if port.rows == "item")
            made = program.run([probe[name] for name in self._names])
            got = {name: value[:rows] for name, value in zip(self._outputs, made, strict=True)}
            found = difference(got, self._compiled(probe))
            if not found <= TOLERANCE:
                raise ExecutorError(f"for {rows} rows openvino differs by {found:.2g}")
        runs = {
            "program": lambda: program.run([largest[name] for name in self._names]),
            "smallest": lambda: self._compiled(smallest),
            "largest": lambda: self._compiled(largest),
        }
        taken_s = medians(runs)
        first = pays_from(
            bucket, program_s=taken_s["program"], torch_min_s=taken_s["smallest"], torch_max_s=taken_s["largest"]
        )
        _log.info(
            "up to %d rows of %d users on %d threads: openvino %.0f us, torch %.0f to %.0f us; %s",
            bucket.rows, bucket.users, bucket.threads, taken_s["program"] * 1e6, taken_s["smallest"] * 1e6,
            taken_s["largest"] * 1e6, "torch" if first is None else f"openvino from {first} rows on",
        )  # fmt: skip
        return _Choice() if first is None else _Choice(program, first, nbytes)

    def _program(self, bucket: Bucket, example: Given) -> PreparedProgram:
        from plait_kernels.executors.openvino_static import StaticPrograms

        single = bucket.users == 1
        converted = self._converted.get(single)
        if converted is None:
            converted = self._converted[single] = StaticPrograms(_computation(self._compiled, self._ports, example))
        assert isinstance(converted, StaticPrograms)
        settings = OpenVinoSettings(threads=lambda: bucket.threads)
        return converted.compile([tuple(example[name].shape) for name in self._names], settings)

    def _keep(self, bucket: Bucket, choice: _Choice) -> None:
        """Take a choice; forget the oldest ones if there are too many."""
        self._choices[bucket] = choice
        while (
            len(self._choices) > self._max_buckets or sum(each.bytes for each in self._choices.values()) > _MAX_BYTES
        ) and len(self._choices) > 1:
            self._choices.popitem(last=False)


def _computation(compiled: Compiled, ports: Sequence[Port], example: Given) -> Computation:
    inputs = tuple(
        InputSpec(name=port.name, shape=(None, *port.shape[1:]), dtype=getattr(torch, port.dtype)) for port in ports
    )
    return Computation(module=compiled.as_module(), inputs=inputs, example=tuple(example[port.name] for port in ports))


def _bytes_of(nodes: Sequence[Node], bucket: Bucket) -> int:
    """Return the bytes of all values of a batch, of which a program keeps a part."""
    rows = {"user": bucket.users, "item": bucket.rows, "none": bucket.rows}
    return sum(4 * prod(rows[node.rows] if size == ROWS else size for size in node.shape) for node in nodes)


class DenseGraphs:
    """Graphs of `compiled`, whose constants are on a GPU: one for each bucket, replayed without Python.

    Threads take turns. A batch is filled up to its bucket with zeros, whose rows nobody sees: rows of a program do not
    see each other.
    """

    def __init__(self, compiled: Compiled, device: torch.device, memory: GraphMemory) -> None:
        """Capture nothing yet: a bucket is captured when it comes again."""
        self._ports = compiled.program.inputs
        self._outputs = tuple(name for name, _ in compiled.program.outputs)
        self._device = device
        self._turn = threading.Lock()
        self._program = GraphProgram(compiled.as_module().eval(), memory.buffers(), name="the dense half")

    def run(self, given: Given, users: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the outputs of a batch of `users` users and `rows` candidates, on the CPU."""
        inputs = [
            self._filled(given[port.name], filled_up(users if port.rows == "user" else rows)) for port in self._ports
        ]
        with self._turn:  # a replay overwrites what the last one lent
            made = self._program.run(inputs, copy=False)
            return {name: value[:rows].to("cpu", copy=True) for name, value in zip(self._outputs, made, strict=True)}

    def _filled(self, value: torch.Tensor, count: int) -> torch.Tensor:
        """Return a tensor of `count` rows on the device; rows beyond those of `value` are zeros."""
        if len(value) == count:
            return value.to(self._device)
        made = torch.zeros(count, *value.shape[1:], dtype=value.dtype, device=self._device)
        made[: len(value)] = value
        return made
