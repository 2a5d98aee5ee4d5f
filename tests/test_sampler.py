"""The order of the samples: who gets which, in which step, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import parts


@pytest.fixture(scope="module")
def sampler() -> ModuleType:
    """The module of a generated project."""
    parts.load("mlp", "synthetic_tabular")
    import importlib

    return importlib.import_module("parts_mlp_synthetic_tabular.sampler")


def grains(
    sampler: ModuleType, world: int, steps: int, **options: Any
) -> list[dict[int, list[Any]]]:
    """Of each step its grains, {number: its keys}, gathered from all ranks."""
    gathered: list[dict[int, list[Any]]] = [{} for _ in range(steps)]
    lengths = set()
    for rank in range(world):
        mine = make(sampler, rank, world, steps, **options)
        keys, m = list(mine), mine.micro_batch_size
        lengths.add(len(keys))
        assert len(keys) == len(mine)
        for place in range(0, len(keys), m):
            step, turn = divmod(place // m, mine.rounds)
            if mine.has_grain(turn):
                assert mine.grain(turn) not in gathered[step]
                gathered[step][mine.grain(turn)] = keys[place : place + m]
    assert len(lengths) == 1, "the ranks do not run the same number of rounds"
    return gathered


def make(sampler: ModuleType, rank: int, world: int, steps: int, **options: Any) -> Any:
    """The sampler of one rank, `done` steps and `samples` samples into the stream."""
    length, batch, micro = options["length"], options["batch"], options["micro"]
    done, samples = options.get("done", 0), options.get("samples", 0)
    one = sampler.GrainSampler(
        range(length), batch, micro, rank, world, options.get("seed", 0), done + steps
    )
    one.set_step(done, samples)
    return one


@given(
    length=st.integers(1, 200),
    per_step=st.integers(1, 12),
    micro=st.integers(1, 7),
    world=st.integers(1, 9),
    done=st.integers(0, 50),
    seed=st.integers(0, 2**40),
)
def test_each_position_of_the_stream_is_trained_on_once_on_any_ranks(
    sampler: ModuleType, length: int, per_step: int, micro: int, world: int, done: int, seed: int
) -> None:
    batch, steps = per_step * micro, 3
    where = {"length": length, "batch": batch, "micro": micro, "seed": seed}
    where |= {"done": done, "samples": done * batch}
    spread = grains(sampler, world, steps, **where)
    alone = grains(sampler, 1, steps, **where)
    assert spread == alone  # the same grains, whoever runs them
    assert all(sorted(step) == list(range(per_step)) for step in alone)
    keys = [key for step in alone for number in sorted(step) for key in step[number]]
    first = done * batch
    assert [epoch for epoch, _ in keys] == [
        p // length for p in range(first, first + steps * batch)
    ]
    for epoch in {epoch for epoch, _ in keys}:
        seen = Counter(index for e, index in keys if e == epoch)
        assert max(seen.values()) == 1
        assert set(seen) <= set(range(length))


@given(st.integers(1, 300), st.integers(0, 2**62))
def test_an_epoch_is_a_permutation(sampler: ModuleType, n: int, seed: int) -> None:
    assert sorted(sampler.permute(np.arange(n), n, seed)) == list(range(n))


def test_a_resume_goes_on_where_the_stream_was(sampler: ModuleType) -> None:
    whole = grains(sampler, 1, 9, length=31, batch=12, micro=2)
    moved = grains(sampler, 5, 4, length=31, batch=12, micro=2, done=5, samples=60)
    assert moved == whole[5:]


def test_another_global_batch_size_goes_on_from_the_samples(sampler: ModuleType) -> None:
    def stream(spread: list[dict[int, list[Any]]]) -> list[Any]:
        return [key for step in spread for number in sorted(step) for key in step[number]]

    before = stream(grains(sampler, 2, 5, length=31, batch=12, micro=2))
    after = stream(grains(sampler, 3, 3, length=31, batch=20, micro=4, done=5, samples=60))
    assert before + after == stream(grains(sampler, 1, 10, length=31, batch=12, micro=2))


def test_a_data_set_smaller_than_a_global_batch_works(sampler: ModuleType) -> None:
    keys = [
        k
        for step in grains(sampler, 3, 2, length=5, batch=12, micro=2)
        for g in step.values()
        for k in g
    ]
    assert Counter(epoch for epoch, _ in keys) == {0: 5, 1: 5, 2: 5, 3: 5, 4: 4}


def test_the_shuffle_is_a_good_one(sampler: ModuleType) -> None:
    """Against chance: where an index lands, what follows it, how far it moves; no p below 1e-4."""
    n, trials = 30, 6000
    shuffles = np.array([sampler.permute(np.arange(n), n, seed) for seed in range(trials)])
    counts = np.zeros((n, n))
    for place in range(n):
        counts[place] = np.bincount(shuffles[:, place], minlength=n)
    assert stats.chisquare(counts.ravel(), ddof=2 * n - 2).pvalue > 1e-4
    steps = (np.diff(shuffles, axis=1) % n).ravel()  # the next index, seen from this one
    assert stats.chisquare(np.bincount(steps, minlength=n)[1:]).pvalue > 1e-4
    first_two = shuffles[:, 0] * n + shuffles[:, 1]
    pairs = np.bincount(first_two, minlength=n * n).reshape(n, n)
    assert stats.chisquare(pairs[~np.eye(n, dtype=bool)]).pvalue > 1e-4
    big = 100_003
    shuffle = sampler.permute(np.arange(big), big, 7)
    assert abs(stats.spearmanr(np.arange(big), shuffle).statistic) < 4 / big**0.5
    assert stats.spearmanr(shuffle[:-1], shuffle[1:]).pvalue > 1e-4


def test_small_data_sets_see_all_orders(sampler: ModuleType) -> None:
    seen = Counter(tuple(sampler.permute(np.arange(4), 4, seed)) for seed in range(12_000))
    assert len(seen) == 24
    assert stats.chisquare(list(seen.values())).pvalue > 1e-4


def test_ten_billion_samples_cost_no_more_than_a_few(sampler: ModuleType) -> None:
    n = 10**10
    positions = np.arange(n - 1000, n)
    indices = sampler.permute(positions, n, 3)
    assert len(set(indices.tolist())) == 1000
    assert indices.min() >= 0
    assert indices.max() < n
    deep = sampler.GrainSampler(range(n), 96, 4, 5, 8, 0, 10**9)
    deep.set_step(10**8, 96 * 10**8)  # an epoch is 1.04e8 steps: this step straddles two
    assert [next(iter(deep))[0]] == [0]


def test_seeds_change_the_order_and_nothing_else_does(sampler: ModuleType) -> None:
    positions = np.arange(100)
    orders = {
        tuple(sampler.permute(positions, 100, sampler.seed_of(seed, epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    mine = make(sampler, 0, 1, 3, length=50, batch=12, micro=2)
    before = list(mine)
    mine.set_epoch(7)
    assert list(mine) == before


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9))
def test_an_evaluation_counts_each_sample_once(
    sampler: ModuleType, n: int, batch: int, world: int
) -> None:
    seen: list[int] = []
    rounds = set()
    for rank in range(world):
        mine = sampler.EvaluationSampler(n, batch, rank, world)
        batches = list(mine)
        rounds.add(len(batches))
        assert all(batches), "a rank without a batch still needs one to run"
        seen += [
            index for turn, keys in enumerate(batches) if mine.has_batch(turn) for _, index in keys
        ]
    assert sorted(seen) == list(range(n))
    assert len(rounds) == 1


@given(st.integers(2, 500), st.floats(0.001, 0.999))
def test_the_held_out_split_has_two_sides_and_the_right_size(
    sampler: ModuleType, n: int, fraction: float
) -> None:
    chosen = sampler.held_out(n, fraction)
    assert chosen.any()
    assert not chosen.all()
    assert abs(chosen.sum() - n * fraction) <= 1 + 5 * (n * fraction * (1 - fraction)) ** 0.5
    # Growth moves no sample, but for the one that keeps a side from being empty.
    assert (sampler.held_out(n + 7, fraction)[:n] != chosen).sum() <= 1
