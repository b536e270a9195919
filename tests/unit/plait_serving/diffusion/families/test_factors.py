"""LoRA sets as row-wise factors: which files are taken, what a batch's rows get, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from plait_kernels.executors import AdaptedLayer
from plait_serving.diffusion.families.factors import FactorStore
from plait_serving.diffusion.families.rows import BatchLayout
from plait_serving.diffusion.lora.kinds import MAX_ROW_RANK, Factor, FileMatrix
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.lora.targets import ModuleRef
from plait_serving.diffusion.protocols import Conditioning

FIRST = [AdaptedLayer(path="unet.down", width_in=6, width_out=4)]
SECOND = [AdaptedLayer(path="unet.up", width_in=3, width_out=5), AdaptedLayer(path="unet.out", width_in=2, width_out=2)]


def factor(inputs: int, outputs: int, rank: int, *, alpha: float, seed: int) -> Factor:
    """A random one, in float16 as files have it."""
    rng = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, inputs, generator=rng), torch.randn(outputs, rank, generator=rng)
    return Factor(first=FileMatrix(left=up.half(), right=down.half()), alpha=alpha, rank=rank, bound=100.0)


def lora(name: str, **changed: Factor) -> LoadedLora:
    """A file of UNet layers; "text" is one of the text encoder."""
    refs = {ModuleRef("text_encoder" if path == "text" else "unet", path): one for path, one in changed.items()}
    return LoadedLora(name=name, factors=refs, nbytes=1)


def layout(*counts: int, cfg: bool = True) -> BatchLayout:
    """Of requests for that many images each."""
    text = torch.zeros(2 if cfg else 1, 77, 4)
    return BatchLayout.of([Conditioning(text=text, added={}, n=n) for n in counts])


def delta(one: Factor, scale: float) -> torch.Tensor:
    """What `x @ it` adds."""
    up, down = one.plain
    return (scale * one.alpha / one.rank * up.float() @ down.float()).T


DOWN_A, DOWN_B = factor(6, 4, 2, alpha=1.0, seed=1), factor(6, 4, 9, alpha=9.0, seed=2)
UP = factor(3, 5, 1, alpha=2.0, seed=3)
ONE, TWO = lora("one", down=DOWN_A, text=UP), lora("two", down=DOWN_B, up=UP)


@pytest.fixture
def store() -> FactorStore:
    """Over two programs."""
    return FactorStore("unet", FIRST, SECOND)


def test_a_file_is_taken_if_all_its_unet_layers_are_adapted(store):
    """Text encoders do not matter; one other UNet layer does."""
    assert store.takes(ONE)
    assert store.takes(lora("text only", text=UP))
    assert not store.takes(lora("conv", down=DOWN_A, conv1=UP))
    assert not FactorStore("unet").takes(ONE)


def test_requests_with_one_set_share_its_factors(store):
    """One row for all, whatever the images and branches; other scales or a request without a set: one for each."""
    (shared, _), where = store.of([((ONE, 0.5),)] * 3, layout(2, 1, 1)), layout(2, 1, 1)
    first, second = shared.by_path["unet.down"]
    assert (shared.rows, shared.given, len(first), len(second)) == (8, 1, 1, 1)
    torch.testing.assert_close((first @ second)[0], delta(DOWN_A, 0.5))
    for sets in ([((ONE, 0.5),), ((ONE, 0.5),), ((ONE, 0.4),)], [((ONE, 0.5),), ((ONE, 0.5),), ()]):
        assert store.of(sets, where)[0].given == 8


def test_mixed_batches_keep_the_ranks_of_earlier_ones(store):
    """So that few shapes occur; unless they are much larger, and never in a batch of one set."""
    wide, narrow, slim = (lora(f"of {rank}", down=factor(6, 4, rank, alpha=1.0, seed=rank)) for rank in (20, 10, 3))

    def ranks(*files: LoadedLora) -> int:
        sets = [((file, 1.0),) for file in files]
        found = store.of(sets, layout(*[1] * len(files)))[0].by_path["unet.down"]
        for k, file in enumerate(files if len(found[0]) > 1 else files[:1]):
            (one,) = file.factors.values()
            torch.testing.assert_close(found[0][k] @ found[1][k], delta(one, 1.0))
        return found[0].shape[2]

    assert ranks(narrow, slim) == 16
    assert ranks(wide, slim) == 24
    assert ranks(slim, narrow) == 24
    assert ranks(narrow, narrow) == 16
    assert ranks(slim, lora("another", down=DOWN_A)) == 8
    assert ranks(slim, narrow, slim) == 16, "forgotten: they were three times as large as what came last"


def test_a_program_without_factors_gets_none(store):
    """No set at all, or none that touches its layers: nothing to bind."""
    assert store.of([(), ()], layout(1, 1)) == (None, None)
    assert store.of([((lora("text only", text=UP), 1.0),)], layout(1)) == (None, None)
    assert store.of([((ONE, 1.0),)], layout(1))[1] is None


def test_the_same_batch_gets_the_same_object(store):
    """Programs know factors by identity. Another scale, order, number of rows or file is another batch."""
    sets = [((ONE, 1.0),), ((TWO, 1.0),)]
    first = store.of(sets, layout(1, 2))[0]
    assert store.of(sets, layout(1, 2))[0] is first
    others = [
        store.of(sets[::-1], layout(1, 2)),
        store.of(sets, layout(2, 1)),
        store.of([((ONE, 0.9),), sets[1]], layout(1, 2)),
    ]
    assert all(other[0] is not first for other in others)
    assert store.of(sets, layout(1, 2))[0] is first
    again = lora("one", down=DOWN_A)
    for scale in range(5):
        store.of([((again, float(scale)),)], layout(1))
    assert store.of(sets, layout(1, 2))[0] is not first, "only the latest are kept"


def test_a_large_batch_is_not_kept_beside_others():
    """It stays while it is the latest; the next that is built drops it, and none that is small."""
    store = FactorStore("unet", FIRST, SECOND, kept_bytes=10_000)
    small, large = [((ONE, 1.0),), ((TWO, 1.0),)], [((ONE, 1.0),), ((ONE, 0.5),)]
    kept, big = store.of(small, layout(1, 1))[0], store.of(large, layout(1, 40))[0]
    assert store.of(large, layout(1, 40))[0] is big
    assert store.of(small, layout(1, 1))[0] is kept
    store.of(small[::-1], layout(1, 1))
    assert store.of(small, layout(1, 1))[0] is kept
    assert store.of(large, layout(1, 40))[0] is not big


loha, lokr = (partial(Factor, is_kronecker=is_kronecker) for is_kronecker in (False, True))


def matrix(rows: int, columns: int, rank: int, *, seed: int) -> FileMatrix:
    """A random product."""
    return factor(columns, rows, rank, alpha=1.0, seed=seed).first


def whole(rows: int, columns: int, *, seed: int) -> FileMatrix:
    """A random matrix."""
    return FileMatrix(right=matrix(rows, columns, 1, seed=seed).made(torch.empty(0)))


@pytest.mark.parametrize(
    "one",
    [
        loha(first=matrix(4, 6, 2, seed=1), second=matrix(4, 6, 3, seed=2), alpha=3.0, rank=2, bound=9.0),
        lokr(first=matrix(2, 3, 1, seed=3), second=matrix(2, 2, 1, seed=4), alpha=3.0, rank=1, bound=9.0),
        lokr(first=whole(2, 3, seed=5), second=matrix(2, 2, 1, seed=6), alpha=3.0, rank=1, bound=9.0),
        lokr(first=whole(4, 3, seed=7), second=whole(1, 2, seed=8), alpha=3.0, rank=1, bound=9.0),
    ],
    ids=["loha", "lokr of products", "lokr", "lokr of whole"],
)
def test_small_lohas_and_lokrs_are_inputs(store, one):
    """Rows of a LoHa or LoKr get exact low-rank factors of its product, beside those of an ordinary LoRA."""
    assert store.takes(lora("one", down=one))
    first, _ = store.of([((lora("one", down=one), 0.5), (lora("two", down=DOWN_A), 2.0))], layout(1))
    (a, b) = first.by_path["unet.down"]
    wanted = (0.5 * one.alpha / one.rank * one.product(torch.empty(0))).T + delta(DOWN_A, 2.0)
    assert torch.allclose(a[0] @ b[0], wanted, atol=1e-5)


def test_what_changes_every_number_is_merged(store):
    """A DoRA, and a LoHa of a high rank, are no inputs."""
    high = loha(
        first=matrix(4, 6, MAX_ROW_RANK // 2, seed=1), second=matrix(4, 6, 3, seed=2), alpha=1.0, rank=2, bound=9.0
    )
    assert not store.takes(lora("high", down=high))
    dora = replace(DOWN_A, magnitude=torch.ones(4))
    assert not store.takes(lora("dora", down=dora))
