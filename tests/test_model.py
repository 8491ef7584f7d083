"""kvshard_ref/model.py and its tools: cached equals whole, drafts are verified, tasks are fair, training works."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ci.model_eval import Cache, extend, generate, propose
from ci.model_tasks import ALL_LAYERS
from ci.register import register_cpu_ci
from ci.train_model import TINY
from kvshard_ref.errors import GeometryError
from kvshard_ref.model import ModelGeometry, Reading, Rows, TinyModel, dequantise, load, quantise, rotate, save, select
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.rows import RowBuffer

register_cpu_ci(est_time=20, stage="commit")

LENGTH = 50
SPARSE = replace(TINY, top_k=9)
FIXTURES = Path(__file__).parent.parent / "fixtures" / "model"


def frozen(geometry: ModelGeometry = SPARSE, seed: int = 3) -> TinyModel:
    return TinyModel(geometry, seed).requires_grad_(requires_grad=False)


def text_of(seed: int, count: int = LENGTH) -> Tensor:
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def in_chunks(model: TinyModel, tokens: Tensor, sizes: list[int]) -> tuple[Cache, Tensor]:
    cache, parts = None, []
    for chunk in tokens.split(sizes, dim=1):
        cache, hidden = extend(model, chunk, cache)
        parts.append(hidden)
    assert cache is not None
    return cache, torch.cat(parts, dim=1)


@pytest.mark.parametrize("top_k", [LENGTH, 9])
@pytest.mark.parametrize("sizes", [[LENGTH], [1] * LENGTH, [7, 1, 30, 12], [16, 16, 18]])
def test_chunks_equal_the_whole(sizes: list[int], top_k: int) -> None:
    """However a text is cut into chunks, the cached forward gives the hidden states of the whole one."""
    model, tokens = frozen(replace(TINY, top_k=top_k)), text_of(1)

    _, hidden = in_chunks(model, tokens, sizes)

    torch.testing.assert_close(hidden, model.whole(model.embed(tokens)), atol=1e-5, rtol=0)


def test_top_k_matters() -> None:
    """The comparison of sparse forwards is no comparison of dense ones."""
    model, tokens = frozen(), text_of(1)

    sparse, dense = (model.whole(model.embed(tokens), sparse=choice) for choice in (True, False))

    differences = (sparse - dense).abs()
    assert differences[:, : SPARSE.top_k].max() < 1e-5
    assert differences.max() > 1e-3


def test_draft_rows_of_chunks_equal_those_of_the_whole() -> None:
    """The draft's rows do not depend on chunks either, though each needs the token behind it."""
    model, tokens = frozen(), text_of(2)

    whole, _ = in_chunks(model, tokens, [LENGTH])
    parts, _ = in_chunks(model, tokens, [1, 20, 3, 26])

    assert whole.draft is not None and parts.draft is not None  # noqa: PT018 - for mypy
    for one, other in zip(whole.draft, parts.draft, strict=True):
        assert one.shape[1] == LENGTH - 1
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_the_queries_may_be_any_part_of_a_chunk() -> None:
    """As with context parallelism: a rank computes every other token, once all rows are there."""
    model, tokens = frozen(), text_of(3)
    layer, hidden, positions = model.layers[0], model.embed(tokens), torch.arange(LENGTH)
    rows = layer.fresh(hidden, positions)

    every = layer.read(hidden, positions, Reading(rows))
    some = layer.read(hidden[:, 1::2], positions[1::2], Reading(rows))

    torch.testing.assert_close(some, every[:, 1::2], atol=1e-5, rtol=0)


def test_rotation_tells_distances_only() -> None:
    """The product of two rotated vectors depends on the distance of their positions, and on nothing else."""
    one, other = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(4))

    def product(first: int, second: int) -> float:
        left, right = rotate(one, torch.tensor([first]), 1e4), rotate(other, torch.tensor([second]), 1e4)
        return float((left * right).sum())

    assert product(3, 10) == pytest.approx(product(103, 110), abs=1e-4)
    assert product(3, 10) != pytest.approx(product(3, 11), abs=1e-3)
    torch.testing.assert_close(rotate(one, torch.tensor([0]), 1e4), one)


def test_embedding_knows_the_tokens_before() -> None:
    """A chunk's embeddings are those of the whole text, given enough of the tokens before it."""
    model, tokens = frozen(), text_of(5)
    context = SPARSE.embedding_context

    whole = model.embed(tokens)

    torch.testing.assert_close(model.embed(tokens[:, 20:], tokens[:, :20]), whole[:, 20:])
    torch.testing.assert_close(model.embed(tokens[:, 3:], tokens[:, :3]), whole[:, 3:])
    torch.testing.assert_close(model.embed(tokens[:, 20:], tokens[:, 20 - context + 1 : 20]), whole[:, 20:])
    assert not torch.allclose(model.embed(tokens[:, 20:]), whole[:, 20:])


def test_ties_go_to_the_lower_position() -> None:
    """Of equal scores the lower positions are selected; rows that are not visible never are."""
    scores = torch.tensor([[1.0, 5.0, 1.0, 1.0, 9.0, 1.0]])
    visible = torch.tensor([[True, True, True, True, False, True]])

    chosen = select(scores, visible, 3)

    assert [0, 1, 2] == chosen[0].nonzero().flatten().tolist()
    assert [0, 1] == select(torch.zeros(1, 6), visible, 2)[0].nonzero().flatten().tolist()
    assert [0] == select(torch.zeros(1, 6), torch.arange(6)[None] < 1, 2)[0].nonzero().flatten().tolist()


def test_verified_drafts_equal_greedy_decoding() -> None:
    """Drafting changes how many rounds an answer takes, never the answer."""
    model, tokens = frozen(), text_of(6, 20)
    cache, _ = in_chunks(model, tokens, [20])

    said, rounds = generate(model, cache, 24)

    known = tokens
    for _ in range(24):
        following = model.logits(model.whole(model.embed(known))[:, -1:]).argmax(dim=-1)
        known = torch.cat([known, following], dim=1)
    assert known[0, 20:].tolist() == said[:24]
    assert len(said) == 1 + sum(rounds)


def test_a_good_draft_is_accepted() -> None:
    """Where the answer is always the same token, drafts are accepted in full."""
    model = frozen()
    model.embedding[:, :] = 0.0
    cache, _ = in_chunks(model, text_of(6, 20), [20])

    assert [4, 4, 4] == generate(model, cache, 13)[1]


def test_draft_over_a_known_text_equals_serving() -> None:
    """Unrolled over a text whose drafts were all right, the draft says what it proposed in serving."""
    model = frozen()
    cache, _ = in_chunks(model, text_of(7, 30), [30])
    said, _ = generate(model, cache, 1)
    from_serving = propose(model, cache, said[0])

    tokens = torch.tensor([[said[0], *from_serving]])
    _, hidden = extend(model, tokens, cache)
    inputs = torch.cat([cache.hidden, hidden[:, :-1]], dim=1)
    outputs = model.draft.unroll(model.embed(tokens, cache.tokens), inputs, 29, cache.draft)

    assert from_serving == [int(model.draft_logits(each)[0, 0].argmax()) for each in outputs]


def test_a_rank_without_a_token_has_no_keys() -> None:
    """Keys of no token, as of an empty share of a chunk, are quantised to none, and back."""
    packed = quantise(torch.empty(1, 0, 32))

    assert tuple(packed.shape) == (1, 0, 36)
    assert tuple(dequantise(packed, torch.float32).shape) == (1, 0, 32)


def test_quantised_index_keys_fit_the_cache() -> None:
    """Keys with a scale per token survive a page-major buffer, and are near the plain ones."""
    geometry = replace(SPARSE, quantised_index=True)
    keys = torch.randn(1, 8, geometry.index_width, generator=torch.Generator().manual_seed(8))
    _, component = geometry.components(torch.float32)
    buffer = RowBuffer(component, 2, 4, "cpu")

    buffer.put(torch.arange(8), quantise(keys)[0])

    restored = dequantise(buffer.take(torch.arange(8)), torch.float32)
    torch.testing.assert_close(restored, keys[0], atol=0.15, rtol=0)


@pytest.mark.parametrize("geometry", [SPARSE, replace(SPARSE, quantised_index=True)])
def test_a_sharded_cache_in_between(geometry: ModelGeometry) -> None:
    """Rows that two ranks keep, in pages of any order, serve as rows in one tensor do."""
    model, tokens, placement = frozen(geometry), text_of(9), Placement(2, 4)
    components = geometry.components(torch.float32)
    pools = [ShardPool(rank, placement, 9, len(model.layers), components) for rank in range(2)]
    pages = np.random.default_rng(1).permutation(np.arange(2, 20))[:13]
    locs = (pages[:, None] * 4 + np.arange(4)).reshape(-1)[:LENGTH]
    parts = []
    for start, end in pairwise((0, 13, 14, LENGTH)):
        hidden, positions = model.embed(tokens[:, start:end], tokens[:, :start]), torch.arange(start, end)
        for at, layer in enumerate(model.layers):
            gathered = []
            for component, fresh in zip(components, layer.fresh(hidden, positions), strict=True):
                rows = torch.empty(1, end, component.width, dtype=component.dtype)
                for pool in pools:
                    pool.write(at, component.name, pool.owned(locs[start:end]), fresh[0])
                    mine = pool.owned(locs[:end])
                    rows[0, mine.positions] = pool.rows_of(at, component.name).take(mine.rows)
                gathered.append(rows)
            hidden = layer.read(hidden, positions, Reading(Rows(*gathered)))
        parts.append(hidden)

    torch.testing.assert_close(torch.cat(parts, dim=1), model.whole(model.embed(tokens)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layers": 0}, "layers is 0, expected at least 1"),
        ({"top_k": -3}, "top_k is -3, expected at least 1"),
        ({"rope_width": 15}, "rope_width is 15, rope_base 10000.0, expected an even width"),
        ({"index_width": 8}, "index_width is 8, expected at least 16"),
        ({"rope_base": 1.0}, "rope_base 1.0, expected an even width and a base above 1"),
    ],
)
def test_errors_of_geometry(wrong: dict[str, Any], says: str) -> None:
    """The value and what was expected."""
    with pytest.raises(GeometryError, match=says):
        ModelGeometry(**wrong)


def test_size() -> None:
    """Small enough to be kept with the sources, and its rows as wide as the recipe says."""
    geometry = ModelGeometry()

    assert 2_000_000 < sum(each.numel() for each in TinyModel(geometry).parameters()) < 4_000_000
    assert [64, 32] == [each.width for each in geometry.components(torch.bfloat16)]


def test_weights_survive_a_file(tmp_path: Path) -> None:
    """Geometry and weights are read as they were written; a seed makes the same weights, another others."""
    model = frozen()
    save(model, tmp_path / "model.safetensors")

    again = load(tmp_path / "model.safetensors", quantised_index=True)

    assert replace(SPARSE, quantised_index=True) == again.geometry
    for name, weight in frozen().state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(model.embedding, frozen(seed=4).embedding)


def test_a_layer_without_far_rows_depends_on_its_window_only() -> None:
    """Restricted to one layer, a far byte reaches a query through that layer alone; layers of near rows drop it."""
    model = frozen(replace(TINY, top_k=LENGTH, layers=1, embedding_context=1))
    one = text_of(1)
    other = one.clone()
    other[0, 2] = (other[0, 2] + 1) % 256

    def difference(far_layer: int) -> float:
        labels = torch.full((1, LENGTH), far_layer)
        first, second = (model.whole(model.embed(each), labels)[:, -1] for each in (one, other))
        return float((first - second).abs().max())

    assert [True, True, False] == [difference(label) > 1e-6 for label in (ALL_LAYERS, 0, 1)]
