"""New rows into matrices that are being read: what a refresh does to them, and what can be done before."""

from __future__ import annotations

import torch

__all__ = ["touch_pages", "write_rows"]

_PAGE_BYTES = 4096


def write_rows(matrix: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Row ``ids[i]`` (k,) int64, distinct, of a `TableSet`'s writable matrix becomes ``rows[i]`` (k, columns) of its
    dtype. Nobody may look rows up meanwhile."""
    matrix.index_copy_(0, ids, rows)


def touch_pages(matrix: torch.Tensor, ids: torch.Tensor) -> None:
    """Makes the pages on which those rows begin and end this process's own, so that `write_rows` need not wait for the
    kernel to copy them (one or two microseconds each, and more where the file is not in memory).

    Others may look rows up meanwhile, but none may be written: a byte of each page is written as it was read.
    """
    row_bytes = matrix.shape[1] * matrix.element_size()
    start = matrix.data_ptr()
    first = start + ids * row_bytes
    pages = torch.unique(torch.cat([first, first + (row_bytes - 1)]) // _PAGE_BYTES)
    places = (pages * _PAGE_BYTES - start).clamp_(min=0)
    flat = matrix.view(-1).view(torch.uint8)
    flat.index_copy_(0, places, flat.index_select(0, places))
