"""Arithmetic of ranks, grains and rounds, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaffold import report
from scaffold.answers import Answers
from scaffold.topology import Rounds, Topology


@given(grains=st.integers(1, 10_000), ranks=st.integers(1, 10_000))
def test_rounds_hold_every_grain_and_no_round_is_wasted(grains: int, ranks: int) -> None:
    shared = Rounds(grains, ranks)
    assert shared.rounds * ranks >= grains > (shared.rounds - 1) * ranks
    assert 0 <= shared.idle < 1
    assert (shared.idle == 0) == (grains % ranks == 0)


@given(
    nodes=st.integers(1, 64),
    gpus=st.integers(1, 16),
    micro=st.integers(1, 64),
    grains=st.integers(1, 500),
)
def test_a_better_micro_batch_divides_the_batch_and_halves_the_idle_share(
    nodes: int, gpus: int, micro: int, grains: int
) -> None:
    topology = Topology(nodes, gpus, micro * grains, micro)
    better = topology.better_micro_batch()
    if better is not None:
        assert topology.global_batch_size % better == 0
        idle = Rounds(topology.global_batch_size // better, topology.ranks).idle
        assert idle < topology.rounds().idle / 2


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        (
            Answers("demo"),
            ["1 node × 2 GPUs = 2 ranks", "24 micro-batches of 4", "12 rounds", "0% idle"],
        ),
        (Answers("demo", nodes=5, gpus_per_node=1), ["5 nodes × 1 GPU = 5 ranks", "4% idle"]),
        (Answers("demo", gpus_per_node=1), ["1 rank runs 24 rounds"]),
        (
            Answers("demo", nodes=2, gpus_per_node=4, strategy="fsdp-tp"),
            ["= 8 ranks", "4 ranks of a node work on one micro-batch", "2 groups run 12 rounds"],
        ),
        (Answers("demo", nodes=4, gpus_per_node=8), ["25% idle", "train.micro_batch_size = 3"]),
    ],
)
def test_the_report_says_in_plain_words_what_runs(answers: Answers, lines: list[str]) -> None:
    text = report.plan(answers)
    for line in lines:
        assert line in text, text


def test_numbers_of_other_rank_counts_stand_under_each_other() -> None:
    rows = report.plan(Answers("demo", nodes=5, gpus_per_node=1)).splitlines()[-3:]
    ranks, rounds, idle = (row.split() for row in rows)
    assert ranks == ["ranks", "1", "2", "3", "4", "5", "8", "16", "32"]
    assert rounds[1:6] == ["24", "12", "8", "6", "5"]
    assert idle[5] == "4%"
    assert len(rows[0]) == len(rows[1]) == len(rows[2])
