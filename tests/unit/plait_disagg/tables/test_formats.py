"""Rows as float32, float16 and int8, and what comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.tables.formats import LAYOUTS, decode_rows, encode_rows
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.reference import SeparateTables
from plait_disagg.tables.values import RowFormat, row_bytes
from support.tables import asks, make_weights, stored

ROWS = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**31), st.floats(-30, 30), st.floats(-8, 8))


def make_rows(shape: tuple[int, int, int, float, float]) -> torch.Tensor:
    """Normal rows of a magnitude (2^exponent) around a centre (in units of it)."""
    count, dim, seed, exponent, centre = shape
    noise = torch.randn((count, dim), generator=torch.Generator().manual_seed(seed))
    return (noise + centre) * 2.0**exponent


def int8_error_bound(rows: torch.Tensor) -> torch.Tensor:
    """Return (n,) float32, the max error of any value of each row of (n, D).

    Half a step of the quantiser, the effect of the 1e-8 in the divisor (at most min(range, 1e-8)), and the roundings
    of q, q * scale and the sum: 4 u of the largest magnitude and of the range each.
    """
    low, high = torch.aminmax(rows, dim=1)
    spread = high - low
    largest = rows.abs().amax(dim=1)
    return spread / 510 + spread.clamp(max=1e-8) + 4 * 2.0**-24 * (largest + spread)


@settings(max_examples=80)
@given(shape=ROWS)
def test_int8_rows_come_back_within_the_bound(shape: tuple[int, int, int, float, float]):
    """At every magnitude, width and centre a value is off by at most the stated bound."""
    rows = make_rows(shape)
    error = (decode_rows(encode_rows(rows, "int8"), "int8") - rows).abs().amax(dim=1)
    assert bool((error <= int8_error_bound(rows)).all())


@settings(max_examples=40)
@given(shape=ROWS)
def test_float16_rows_come_back_rounded(shape: tuple[int, int, int, float, float]):
    """A value is off by at most 2^-11 of itself, or 2^-25 near zero; one beyond 65504 is refused."""
    rows = make_rows(shape)
    if float(rows.abs().max()) >= 65520:
        with pytest.raises(ValueError, match="65504"):
            encode_rows(rows, "float16")
        return
    error = (decode_rows(encode_rows(rows, "float16"), "float16") - rows).abs()
    assert bool((error <= torch.maximum(rows.abs() * 2.0**-11, torch.tensor(2.0**-25))).all())


@pytest.mark.parametrize("row_format", LAYOUTS)
def test_a_row_takes_the_bytes_that_it_should(row_format: RowFormat):
    """D values take 4 D, 2 D or D + 8 bytes, and constant rows are exact in every format."""
    stored = encode_rows(torch.full((3, 24), 0.5), row_format)
    assert stored.nbytes == 3 * row_bytes(24, row_format)
    assert torch.equal(decode_rows(stored, row_format), torch.full((3, 24), 0.5))


@pytest.mark.parametrize("row_format", ["float16", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_format_can_not_hold_is_refused(row_format: RowFormat, value: float):
    """NaN and infinities are refused, and the refusal names the table."""
    with pytest.raises(ValueError, match=rf"table genres: .*{row_format}"):
        stored({"genres": torch.tensor([[0.0, value]])}, formats=row_format)


WEIGHTS = make_weights()


@settings(max_examples=25)
@given(data=st.data(), row_format=st.sampled_from(("float16", "int8")))
def test_any_lookups_equal_those_of_the_decoded_rows(data: st.DataObject, row_format: RowFormat):
    """Any mix of lookups over stored rows, empty ones included, is what the naive twin gives for the decoded rows."""
    wanted = data.draw(asks(WEIGHTS))
    decoded = {name: decode_rows(encode_rows(rows, row_format), row_format) for name, rows in WEIGHTS.items()}
    values = FusedTables(stored(WEIGHTS, formats=row_format)).lookup(wanted)
    for value, twin in zip(values, SeparateTables(decoded).lookup(wanted), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, twin, rtol=1e-5, atol=2e-5)
