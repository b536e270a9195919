"""Splitting of dot interactions: dot products among the user's vectors are computed once per user.

    Z = stack(z_1 .. z_F)        P = pairs of Z Z^T that a layer reads        linear(cat([.., P, ..]), W)

A pair of two user-side vectors is the same for all candidates. P becomes [P_user, P_item]: the first from the user's
vectors alone, the second from the candidate's vectors against all; the columns of W are permuted accordingly. Then
`factor.factor_linears` computes the user's share of the layer once per user as well. Dot products are rounded in
another order (a difference of about 1e-6), so an exact program is left unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plait_disagg.graph.edit import Draft
from plait_disagg.graph.program import ROWS, TILE, USER_OF, Arg, Node, Program, Ref, Rows

_CAT, _LINEAR, _STACK = "aten.cat.default", "aten.linear.default", "aten.stack.default"
_BMM, _TRANSPOSE, _INDEX = "aten.bmm.default", "aten.transpose.int", "aten.index.Tensor"
_FLATTEN = "aten.flatten.using_ints"


def split_interactions(
    program: Program, constants: Mapping[str, torch.Tensor]
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Return a tiled `program` with every such interaction split, and its constants."""
    work = _InteractionSplit(program, Draft(program, constants))
    for node in program.nodes:
        work.add(node)
    return work.draft.finished(program.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """An interaction: the node that picks pairs, the places in the stack of each, the stacked vectors, and the
    transposed stack.

    `users` maps places in the stack to the user's own vectors, for those that are the user's.
    """

    pick: Node
    pairs: tuple[tuple[int, int], ...]
    stack: Node
    parts: tuple[Ref, ...]
    transposed: Ref
    users: Mapping[int, Ref]

    def is_user(self, pair: tuple[int, int]) -> bool:
        """Return whether both vectors of a pair are the user's."""
        return self.users.keys() >= set(pair)


class _InteractionSplit:
    def __init__(self, program: Program, draft: Draft) -> None:
        self.draft = draft
        self._values = program.values
        self._readers: dict[str, list[Node]] = {}
        for node in program.nodes:
            for name in node.inputs:
                self._readers.setdefault(name, []).append(node)
        self._outputs = {ref.name for _, ref in program.outputs}
        self._by_cat: dict[str, _Found] = {}
        for node in program.nodes:
            found = self._find(node)
            if found is not None:
                (cat,) = self._readers[node.name]
                self._by_cat.setdefault(cat.name, found)

    def add(self, node: Node) -> None:
        """Add a node, or in its place the two parts and their cat, or a layer with permuted columns."""
        if node.name in self._by_cat:
            node = self._parted(node, self._by_cat[node.name])
        elif node.op == _LINEAR and node.parts[0].name in self._by_cat:
            node = self._permuted(node, self._by_cat[node.parts[0].name])
        self.draft.add(node)

    def _find(self, pick: Node) -> _Found | None:
        """Return the interaction that ends in `pick`, if all its readers are layers over one cat."""
        if pick.op != _INDEX or pick.rows != "item" or not self._feeds_layers(pick):
            return None
        chosen = pick.args[1]
        flat = self._made_by(pick.args[0], _FLATTEN)
        product = self._made_by(flat.args[0], _BMM) if flat is not None and flat.args[1:] == (1,) else None
        if product is None or not isinstance(chosen, tuple) or len(chosen) != 2 or chosen[0] is not None:
            return None
        stack, transposed = self._made_by(product.args[0], _STACK), self._made_by(product.args[1], _TRANSPOSE)
        picked = self.draft.tensor(chosen[1].name) if isinstance(chosen[1], Ref) else None
        if stack is None or transposed is None or picked is None:
            return None
        if transposed.args != (Ref(stack.name), 1, 2) or stack.args[1:] != (1,):
            return None
        tiled = {place: self._made_by(part, TILE) for place, part in enumerate(stack.parts)}
        users = {place: tile.parts[0] for place, tile in tiled.items() if tile and not tile.kwargs.get("copy")}
        found = _Found(
            pick=pick,
            pairs=tuple(divmod(pair, len(stack.parts)) for pair in picked.reshape(-1).tolist()),
            stack=stack,
            parts=stack.parts,
            transposed=Ref(transposed.name),
            users=users,
        )
        among_users = sum(found.is_user(pair) for pair in found.pairs)
        return found if 0 < among_users < len(found.pairs) else None

    def _feeds_layers(self, pick: Node) -> bool:
        cats = self._readers.get(pick.name, [])
        if pick.name in self._outputs or len(cats) != 1 or cats[0].op != _CAT or cats[0].name in self._outputs:
            return False
        cat = cats[0]
        layers = self._readers.get(cat.name, [])
        dim = cat.args[1] if len(cat.args) > 1 else 0
        once = cat.parts.count(Ref(pick.name)) == 1 and dim in (1, -1) and len(cat.shape) == 2
        linear = all(layer.op == _LINEAR and layer.args[0] == Ref(cat.name) for layer in layers)
        weights = [layer.args[1] for layer in layers] if linear else [None]
        held = [isinstance(it, Ref) and self.draft.tensor(it.name) is not None for it in weights]
        return once and bool(layers) and all(held)

    def _made_by(self, value: Arg, op: str) -> Node | None:
        node = self._values[value.name] if isinstance(value, Ref) else None
        return node if isinstance(node, Node) and node.op == op else None

    def _parted(self, cat: Node, found: _Found) -> Node:
        """Add the user's dot products, tiled, and the candidate's; return the cat with both in place of the pairs."""
        users = {place: number for number, place in enumerate(sorted(found.users))}
        items = [place for place in range(len(found.parts)) if place not in users]
        among_users = [users[one] * len(users) + users[two] for one, two in filter(found.is_user, found.pairs)]
        own = self._dots(found, "user", [found.users[place] for place in users], None, among_users)
        others = []
        for pair in itertools.filterfalse(found.is_user, found.pairs):
            one, two = pair if pair[0] in items else pair[::-1]  # a dot product is symmetric
            others.append(items.index(one) * len(found.parts) + two)
        other = self._dots(found, "item", [found.parts[place] for place in items], found.transposed, others)
        tiled = replace(own, name=f"{own.name}:tiled", op=TILE, args=(Ref(own.name), Ref(USER_OF)), rows="item")
        both = (self.draft.add(tiled), Ref(other.name))
        parts: list[Arg] = []
        for part in cat.parts:
            parts += both if part == Ref(found.pick.name) else [part]
        return replace(cat, args=(tuple(parts), *cat.args[1:]))

    def _dots(
        self, found: _Found, rows: Rows, vectors: Sequence[Ref], against: Ref | None, pairs: Sequence[int]
    ) -> Node:
        """Add the dot products of `vectors` with `against` (None: with themselves), of which `pairs` are picked."""
        name, count, width = f"{found.pick.name}:{rows}", len(vectors), found.stack.shape[2]

        def add(part: str, op: str, args: tuple[Arg, ...], *shape: int) -> Ref:
            return self.draft.add(
                replace(found.stack, name=f"{name}{part}", op=op, args=args, shape=(ROWS, *shape), rows=rows)
            )

        stack = add(":stack", _STACK, (tuple(vectors), 1), count, width)
        others = count if against is None else len(found.parts)
        against = against or add(":turned", _TRANSPOSE, (stack, 1, 2), width, count)
        product = add(":bmm", _BMM, (stack, against), count, others)
        flat = add(":flat", _FLATTEN, (product, 1), count * others)
        which = self.draft.constant(f"{name}:pairs", torch.tensor(list(pairs), dtype=torch.int64))
        picked = self.draft[add("", _INDEX, (flat, (None, which)), len(pairs)).name]
        assert isinstance(picked, Node)
        return picked

    def _permuted(self, layer: Node, found: _Found) -> Node:
        """Return the layer with the columns of user pairs before those of the others."""
        weight, cat = layer.args[1], self._values[layer.parts[0].name]
        assert isinstance(weight, Ref)
        assert isinstance(cat, Node)
        before = cat.parts[: cat.parts.index(Ref(found.pick.name))]
        start = sum(self._values[part.name].shape[-1] for part in before)
        order = sorted(range(len(found.pairs)), key=lambda place: not found.is_user(found.pairs[place]))
        numbers = self.draft.tensor(weight.name)
        assert numbers is not None
        columns = torch.arange(numbers.shape[1])
        columns[start : start + len(order)] = start + torch.tensor(order)
        moved = self.draft.constant(f"{layer.name}:columns", numbers[:, columns].contiguous())
        return replace(layer, args=(layer.args[0], moved, *layer.args[2:]))
