"""Writing new rows into matrices that are being read: how a refresh does it, and what can be done beforehand."""

from __future__ import annotations

import torch

__all__ = ["touch_pages", "write_rows"]

_PAGE_BYTES = 4096


def write_rows(matrix: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Write `rows[i]` (k, columns) to row `ids[i]` (k,) int64, distinct, of a `TableSet`'s writable matrix.

    The rows are of the matrix's dtype. No lookup may run meanwhile.
    """
    matrix.index_copy_(0, ids, rows)


def touch_pages(matrix: torch.Tensor, ids: torch.Tensor) -> None:
    """Copy the pages on which those rows begin and end into this process's memory, so that `write_rows` need not wait.

    The kernel would otherwise copy them then (one or two microseconds each, and more where the file is not in
    memory). Lookups may run meanwhile, but no row may be written: a byte of each page is written back as it was
    read.
    """
    row_bytes = matrix.shape[1] * matrix.element_size()
    start = matrix.data_ptr()
    first = start + ids * row_bytes
    pages = torch.unique(torch.cat([first, first + (row_bytes - 1)]) // _PAGE_BYTES)
    places = (pages * _PAGE_BYTES - start).clamp_(min=0)
    flat = matrix.view(-1).view(torch.uint8)
    flat.index_copy_(0, places, flat.index_select(0, places))
