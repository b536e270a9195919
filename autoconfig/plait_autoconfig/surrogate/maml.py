"""Morphling's meta-model: a network with two hidden layers of 128 units, pre-trained by MAML with second derivatives.

MAML (Finn et al., ICML 2017): the parameters are moved to where one gradient step on a few points of a service
yields a good model of that service. All calls to torch are made here; inputs and outputs are numpy arrays.

Symbols: N cells, D features, n trials, S services, T tasks of a step, K points of a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait_autoconfig.surrogate.background import Floats

_HIDDEN = 128
_TASKS, _POINTS = 4, 24  # of a meta-step
_INNER_RATE, _META_RATE = 0.05, 1e-3


@dataclass(frozen=True, slots=True)
class Network:
    """The parameters: weights (.., fan_in, fan_out) and biases (.., 1, fan_out), alternating; `..` is nothing or T."""

    parameters: tuple[Tensor, ...]

    def __call__(self, features: Tensor) -> Tensor:
        """Map features (.., n, D) to values (.., n)."""
        w1, b1, w2, b2, w3, b3 = self.parameters
        hidden = torch.relu(features @ w1 + b1)
        return (torch.relu(hidden @ w2 + b2) @ w3 + b3)[..., 0]

    def stepped(self, features: Tensor, values: Tensor, *, differentiable: bool = False) -> Network:
        """Return the network after one gradient step on the mean squared error of each task."""
        loss = ((self(features) - values) ** 2).mean(-1).sum()
        slopes = torch.autograd.grad(loss, self.parameters, create_graph=differentiable)
        return Network(tuple(p - _INNER_RATE * slope for p, slope in zip(self.parameters, slopes, strict=True)))

    def adapted(self, features: Floats, values: Floats, steps: int) -> Network:
        """Return the network after `steps` gradient steps on the trials (n, D), (n,)."""
        rows, wanted = _tensor(features), _tensor(values)
        network = self
        for _ in range(steps):
            network = Network(tuple(p.detach().requires_grad_() for p in network.parameters)).stepped(rows, wanted)
        return Network(tuple(p.detach() for p in network.parameters))

    def predict(self, features: Floats) -> Floats:
        """Map features (N, D) to values (N,)."""
        with torch.no_grad():
            return self(_tensor(features)).double().numpy()


def fresh_network(features: int, seed: int) -> Network:
    """Return a He-initialised network whose head starts at zero."""
    source = torch.Generator().manual_seed(seed)
    sizes = [(features, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, 1)]
    parameters: list[Tensor] = []
    for fan_in, fan_out in sizes:
        scale = (2.0 / fan_in) ** 0.5 if fan_out > 1 else 0.0
        parameters += [scale * torch.randn(fan_in, fan_out, generator=source), torch.zeros(1, fan_out)]
    return Network(tuple(parameters))


def meta_trained(services: Sequence[tuple[Floats, Floats]], seed: int, *, steps: int) -> Network:
    """Run MAML over services, each the features (n, D) of its cells and their values (n,); n may differ."""
    rng = np.random.default_rng(seed)
    network = fresh_network(services[0][0].shape[1], seed)
    parameters = [p.requires_grad_() for p in network.parameters]
    optimiser = torch.optim.Adam(parameters, lr=_META_RATE)
    for _ in range(steps):
        chosen = rng.integers(0, len(services), _TASKS)
        support, query = (_draw([services[s] for s in chosen], rng) for _ in range(2))
        spread = Network(tuple(p.expand(_TASKS, *p.shape) for p in parameters))
        loss = ((spread.stepped(*support, differentiable=True)(query[0]) - query[1]) ** 2).mean()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    return Network(tuple(p.detach() for p in parameters))


def _draw(services: Sequence[tuple[Floats, Floats]], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw K points of each service, (T, K, D) and (T, K)."""
    picks = [rng.integers(0, len(values), _POINTS) for _, values in services]
    rows = np.array([features[pick] for (features, _), pick in zip(services, picks, strict=True)])
    return _tensor(rows), _tensor(np.array([values[pick] for (_, values), pick in zip(services, picks, strict=True)]))


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))
