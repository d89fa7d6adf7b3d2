"""Transactions over files: any way to lay whole ones out is whole, any row too few or too many is found."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from cdc.log.audit.finding import DamageKind
from cdc.log.audit.rows import Gap, Transactions, runs
from cdc.position import Position

Place = tuple[int, int]


def laid_out(random: Random) -> list[list[Place]]:
    """Places of whole transactions in files, neighbours' ranges touching where one is spread."""
    files: list[list[Place]] = [[]]
    for position in range(10, 10 + random.randint(1, 12)):
        for ordinal in range(random.randint(1, 6)):
            if files[-1] and random.random() < 0.2:
                files.append([])
            files[-1].append((position, ordinal))
    for file in files:
        random.shuffle(file)
    return files


def found(files: Sequence[list[Place]], after: int = 0, unseen: Sequence[Place] = ()) -> list[Gap]:
    """What is told of the files, settled after each as far as the next one allows."""
    transactions, gaps = Transactions(Position(after)), []
    ordered = sorted((file for file in files if file), key=min)
    for number, file in enumerate(ordered):
        position, ordinal = np.array(file).T
        transactions.add(number, runs(position, ordinal))
        following = min(ordered[number + 1])[0] if number + 1 < len(ordered) else None
        gaps += transactions.check_below(following, unseen)
    return gaps


@pytest.mark.parametrize("seed", range(30))
def test_whole_transactions_are_whole_however_they_lie(seed: int):
    assert found(laid_out(Random(seed))) == []


@pytest.mark.parametrize("seed", range(30))
def test_a_row_that_is_there_twice_is_found(seed: int):
    random = Random(seed)
    files = laid_out(random)
    place = random.choice([place for file in files for place in file])
    near = next(file for file in files if place in file)
    near.append(place)
    (gap,) = found(files)
    assert (gap.damage, gap.first, gap.ordinal) == (DamageKind.DUPLICATE, *place)


@pytest.mark.parametrize("seed", range(30))
def test_a_row_that_is_missing_before_another_is_found_unless_it_may_be_where_nobody_looked(seed: int):
    random = Random(seed)
    files = laid_out(random)
    lasts = {position: max(o for f in files for p, o in f if p == position) for f in files for position, _ in f}
    inner = [place for file in files for place in file if place[1] < lasts[place[0]]]
    if not inner:
        return
    place = random.choice(inner)
    next(file for file in files if place in file).remove(place)
    (gap,) = found(files)
    assert (gap.damage, gap.first, gap.ordinal) == (DamageKind.HOLE, place[0], place[1] + 1)
    assert found(files, unseen=[(place[0], place[0])]) == []
    assert found(files, after=place[0]) == []
