"""One call for all who ask at the same time."""

from __future__ import annotations

import asyncio

import pytest

from plait_serving.deployments.images.handle import SingleFlight


class Counted:
    """A call that waits for its gate and returns its number; or raises it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.begun = 0
        self.gates: list[asyncio.Event] = []
        self._fails = fails

    async def __call__(self) -> int:
        self.begun += 1
        number, gate = self.begun, asyncio.Event()
        self.gates.append(gate)
        await gate.wait()
        if self._fails:
            raise LookupError(str(number))
        return number

    async def until(self, begun: int) -> None:
        async with asyncio.timeout(60):
            while self.begun < begun:  # noqa: ASYNC110  # the fake counts, it has no event
                await asyncio.sleep(0.001)


async def test_who_asks_together_gets_one_answer() -> None:
    """A hundred questions are one call."""
    call = Counted()
    together = SingleFlight(call, patience_s=60.0)
    asked = [asyncio.create_task(together.ask()) for _ in range(100)]
    await call.until(1)
    call.gates[0].set()
    assert set(await asyncio.gather(*asked)) == {1}
    assert call.begun == 1


async def test_nobody_gets_an_answer_from_before_the_question() -> None:
    """Who asks while a call runs gets that of the next one, which begins when the first has ended."""
    call = Counted()
    together = SingleFlight(call, patience_s=60.0)
    first = asyncio.create_task(together.ask())
    await call.until(1)
    later = [asyncio.create_task(together.ask()) for _ in range(10)]
    await asyncio.sleep(0.05)
    assert call.begun == 1
    call.gates[0].set()
    assert await first == 1
    await call.until(2)
    call.gates[1].set()
    assert set(await asyncio.gather(*later)) == {2}


async def test_a_call_that_hangs_holds_up_nobody_for_long() -> None:
    """After the patience the next one is made beside it."""
    call = Counted()
    together = SingleFlight(call, patience_s=0.01)
    hanging = asyncio.create_task(together.ask())
    await call.until(1)
    second = asyncio.create_task(together.ask())
    await call.until(2)
    call.gates[1].set()
    assert await second == 2
    assert not hanging.done()
    call.gates[0].set()
    assert await hanging == 1


async def test_an_error_is_everybodys_and_a_cancelled_question_nobodys() -> None:
    """Who goes away takes the answer from nobody; the next question is a new call."""
    call = Counted(fails=True)
    together = SingleFlight(call, patience_s=60.0)
    gone, stays = (asyncio.create_task(together.ask()) for _ in range(2))
    await call.until(1)
    gone.cancel()
    call.gates[0].set()
    with pytest.raises(LookupError, match="1"):
        await stays
    again = asyncio.create_task(together.ask())
    await call.until(2)
    call.gates[1].set()
    with pytest.raises(LookupError, match="2"):
        await again
