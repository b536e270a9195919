"""How a person and a film are compared, in both ranking models of this folder.

Symbols: B rows, P vectors of the person, F of the film, D their width.
"""

from __future__ import annotations

import torch
from torch import nn


class Match(nn.Module):
    """A logit per row from the P * F dot products of person with film and the vectors themselves."""

    def __init__(self, *, person: int, film: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.top = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(person * film + (person + film) * dim, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, person: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        """Map (B, P, D) and (B, F, D) to (B,)."""
        dots = torch.bmm(person, film.transpose(1, 2))
        read = torch.cat([dots.flatten(1), person.flatten(1), film.flatten(1)], dim=1)
        logits: torch.Tensor = self.top(read).squeeze(1)
        return logits
