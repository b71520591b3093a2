"""Where a step and a turn are counted: the edges of the bins, and sums by hand."""

from hspec.evaluation.bins import INPUTS, ORIGINS, POSITIONS, Bins, by_input, by_origin, by_position
from hspec.evaluation.records import Record
from tests.evaluation.test_summary import turn


def record(*turns: tuple[int, list[int]]) -> Record:
    """Of turns with so many prompt tokens and these runs."""
    made = [turn(runs, 0.1, 0.1).model_copy(update={"prompt_tokens": prompt}) for prompt, runs in turns]
    return Record(task="t", id="1", contender="a", setting="greedy", k=3, turns=made, peak_bytes=None, drafter_kv_bytes=0)


def test_labels() -> None:
    assert [Bins((0, 64, 256)).label(i) for i in range(3)] == ["<64", "64-255", "256+"]
    assert [POSITIONS.label(i) for i in range(5)] == ["1-32", "33-64", "65-128", "129-256", "257-512"]


def test_edges() -> None:
    assert [POSITIONS.index(n) for n in (1, 32, 33, 64, 65, 10**6)] == [0, 0, 1, 1, 2, len(POSITIONS) - 1]
    assert [INPUTS.index(n) for n in (0, 63, 64, 255, 256, 10**6)] == [0, 0, 1, 1, 2, len(INPUTS) - 1]


def test_a_step_counts_where_it_begins() -> None:
    """Steps begin with tokens 2 to 31, one each; the next one has tokens 32 to 35, and begins in the first bin; the last 36 and 37."""
    found = by_position(record((10, [1] * 30 + [4, 2])))
    assert found[:3].tolist() == [[34, 31], [2, 1], [0, 0]]


def test_each_turn_is_counted_from_its_own_beginning() -> None:
    found = by_position(record((10, [1] * 31 + [3]), (80, [2, 4])))
    assert found[:2].tolist() == [[31 + 6, 31 + 2], [3, 1]]


def test_a_turn_counts_by_its_own_prompt() -> None:
    found = by_input(record((63, [1, 2]), (64, [4]), (200, [3, 3, 3]), (1024, [])))
    assert found.tolist() == [[3, 2], [13, 4], [0, 0], [0, 0], [0, 0], [0, 0]]


def test_a_step_counts_by_the_origin_of_its_first_token() -> None:
    """Tokens 2 to 4, then 5, then 6 and 7, of which 2, 5 and 6 say where the step belongs; a turn without marks counts nowhere."""
    runs = [3, 1, 2]
    marked = record((10, runs), (10, runs)).model_copy()
    marked.turns[0] = marked.turns[0].model_copy(update={"origins": "npaanpn"})
    found = dict(zip(ORIGINS.values(), by_origin(marked).tolist(), strict=True))
    assert found == {"new": [1, 1], "in the prompt": [3 + 2, 2], "said before": [0, 0]}
