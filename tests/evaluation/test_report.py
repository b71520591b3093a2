"""The report of a small evaluation: what it shows, how it marks drafts, and, in a real browser, that nothing overflows."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from hspec.errors import UsageError
from hspec.evaluation.records import Record, RecordFile, TurnRecord
from hspec.evaluation.report import Span, cost_curves, sentences, spans, training_curves, write_report
from tests.evaluation.browser import check_page
from tests.evaluation.test_summary import CONTENDERS, records_of


def turn(drafted: str, runs: list[int], refused: list[str]) -> TurnRecord:
    letters = [chr(97 + i) for i in range(len(drafted))]
    return TurnRecord(
        question="Why <b>?", text="".join(letters), pieces=letters, tokens=list(range(len(letters))), drafted=drafted, runs=runs,
        refused=[[1] if r else [] for r in refused], refused_text=refused, prompt_tokens=3, finish_reason="stop", looping=False,
        prefill_seconds=1.0, draft_seconds=0.1, verify_seconds=0.2, reached=[1], accepted=[1],
    )  # fmt: skip


def test_spans() -> None:
    """a: the prefill's; then bc drafted and d the target's; e alone, behind a refused draft; fg drafted, where the answer ended."""
    found = spans(turn("01100" + "11", [3, 1, 2], ["", "no <i>", ""]))
    assert found == [
        Span("a", False),
        Span("bc", True),
        Span("d", False),
        Span("e", False, "no <i>"),
        Span("fg", True),
    ]
    assert "".join(s.text for s in found) == "abcdefg"


def with_prompt_of(record: Record, tokens: int) -> Record:
    return record.model_copy(update={"turns": [t.model_copy(update={"prompt_tokens": tokens}) for t in record.turns]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An evaluation as ``hspec eval`` leaves it, with numbers from a seed."""
    records = records_of(np.random.default_rng(0), {"a": 2.2, "b": 1.6})
    shown = turn("01100", [3, 1], ["", "never & nowhere"])
    records = [r.model_copy(update={"turns": [shown]}) if r.id == "0" and r.contender == "a" else r for r in records]
    records = [with_prompt_of(r, 300) if r.task == "code" and int(r.id) < 4 else r for r in records]
    records = [with_prompt_of(r, 1500) if (r.task, r.id, r.contender) == ("code", "9", "a") else r for r in records]
    for record in records:
        marked = [t.model_copy(update={"origins": "n" + "np" * len(t.tokens)}) for t in record.turns]
        RecordFile(tmp_path / "records.jsonl").append(record.model_copy(update={"turns": marked}))
    about = {"target": {"name": "a <target>", "weights": "0123"}, "dtype": "float32", "device": "cpu", "contenders": CONTENDERS}
    (tmp_path / "evaluation.json").write_text(json.dumps(about))
    return tmp_path


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page(folder: Path) -> None:
    path = write_report(folder)
    assert path == folder / "report.html"
    page = path.read_text(encoding="utf-8")
    tags = Tags(page)
    assert not [a for _, a in tags.found for name in ("src", "href") if (a.get(name) or "").startswith(("http", "//"))], (
        "offline"
    )
    assert not [tag for tag, _ in tags.found if tag in ("script", "link") and tag == "script"]
    assert len([tag for tag, _ in tags.found if tag == "svg"]) == 6
    ids = [a["id"] for _, a in tags.found if a.get("id")]
    assert len(set(ids)) == len(ids), "every id of every plot is its own"
    assert "Drafters for a &lt;target&gt;" in page and "Why &lt;b&gt;?" in page
    assert "<mark>bc</mark>" in page and 'title="refused: never &amp; nowhere">e</span>' in page
    assert "a has the largest mean accepted length" in page and "In tau a is ahead of b" in page
    summary = json.loads((folder / "summary.json").read_text())["settings"]["greedy"]
    tau = summary["entrants"]["a"]["tau"]
    assert f"{tau['value']:.2f} <small>{tau['low']:.2f}\N{EN DASH}{tau['high']:.2f}</small>" in page


def cells(page: str, caption: str) -> list[list[str]]:
    """The text of a table's cells, row by row."""
    table = page.split(caption)[1].split("</table>")[0]
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]
    return [[unescape(re.sub(r"<.*?>", "", cell)) for cell in row] for row in rows]


def test_tables_of_bins(folder: Path) -> None:
    """Prompts of 300 tokens are four, too few for an interval; one of 1,500 tokens had drafter a alone."""
    page = write_report(folder).read_text(encoding="utf-8")
    entrants = json.loads((folder / "summary.json").read_text())["settings"]["greedy"]["entrants"]
    head, *rows = cells(page, "Tau by input length (prompts)")
    assert head == ["tokens of the prompt", "a", "b"] and [row[0] for row in rows] == ["<64", "256-1023", "1024-4095"]
    few = entrants["a"]["tau_by_input"][1]["tau"]
    assert rows[0][1].endswith("(25)") and rows[0][2].endswith("(26)") and "\N{EN DASH}" in rows[0][1]
    assert rows[1][1] == f"{few['value']:.2f} ? (4)"
    assert rows[2][1].endswith("? (1)") and rows[2][2] == "-"
    _, *rows = cells(page, "Tau by response position (prompts)")
    for b, row in zip(entrants["b"]["tau_by_position"], rows, strict=True):
        assert row[0] == b["bin"] and row[2].startswith(f"{b['tau']['value']:.2f} ") and row[2].endswith(f"({b['prompts']})")
    assert [row[0] for row in rows] == ["1-32", "33-64", "65-128"]
    _, *rows = cells(page, "Tau by origin (prompts)")
    assert [row[0] for row in rows] == ["new", "in the prompt"]


def test_records_without_origins(folder: Path) -> None:
    """Those of before they were kept: there is no such table."""
    file = RecordFile(folder / "records.jsonl")
    old = [[t.model_copy(update={"origins": ""}) for t in record.turns] for record in file.read()]
    file.rewrite([record.model_copy(update={"turns": turns}) for record, turns in zip(file.read(), old, strict=True)])
    page = write_report(folder).read_text(encoding="utf-8")
    assert "Tau by origin" not in page and "Tau by input length" in page


def test_two_settings_have_ids_of_their_own(folder: Path) -> None:
    for record in RecordFile(folder / "records.jsonl").read():
        RecordFile(folder / "records.jsonl").append(record.model_copy(update={"setting": "T=1"}))
    tags = Tags(write_report(folder).read_text(encoding="utf-8"))
    ids = [a["id"] for _, a in tags.found if a.get("id")]
    assert len(set(ids)) == len(ids) and len([tag for tag, _ in tags.found if tag == "svg"]) == 12


def test_an_interrupted_evaluation(folder: Path) -> None:
    """A kill between two answers of one prompt: that prompt is left out, the rest is shown."""
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["contender"] == "b"
    path.write_text("".join(lines[:-1]))
    write_report(folder)
    summary = json.loads((folder / "summary.json").read_text())["settings"]["greedy"]
    assert summary["prompts"] == {"math": 20, "code": 9}


def test_a_report_changes_nothing_but_the_report(folder: Path) -> None:
    """An evaluation may be writing to the folder meanwhile: its last line may be half there."""
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes() + b'{"task":"ma')
    before = path.read_bytes()
    write_report(folder)
    assert path.read_bytes() == before
    for taken in (path, folder / "summary.json"):
        with pytest.raises(UsageError, match="is there already and is no report: choose another --out"):
            write_report(folder, taken)
    assert path.read_bytes() == before
    assert write_report(folder, folder / "report.html").exists(), "an older report is replaced"


def test_which_answers_are_shown(folder: Path) -> None:
    page = write_report(folder, texts=2).read_text(encoding="utf-8")
    assert len(re.findall("<summary>math, ", page)) == len(re.findall("<summary>code, ", page)) == 2
    page = write_report(folder, folder / "other.html", ids=["7"]).read_text(encoding="utf-8")
    assert re.findall("<summary>(.*?)</summary>", page) == ["math, 7", "code, 7"]
    with pytest.raises(UsageError, match="no answer to a prompt with id 99"):
        write_report(folder, ids=["99"])


def test_sentences() -> None:
    assert sentences({"entrants": {"ar": {"method": "ar"}}, "pairs": []}) == ["Nothing was drafted here."]


def test_training_and_costs(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    held = [{"kind": "held-out", "blocks": b, "loss": 2 - b / 100, "tau_sampling": 1 + b / 100} for b in (10, 20)]
    (run / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"kind": "train"}, *held]))
    costs = {
        "drafting": [{"method": "x", "concurrency": c, "length": 512, "total_ms": 2.0 * c} for c in (1, 2)],
        "verification": [{"rows": 1, "length": 512, "ms": 3.0}],
    }
    (folder / "costs.json").write_text(json.dumps(costs))
    page = write_report(folder, training=[run], costs=folder / "costs.json").read_text(encoding="utf-8")
    assert len([tag for tag, _ in Tags(page).found if tag == "svg"]) == 10
    with pytest.raises(UsageError, match=r"--training .*gone: cannot read"):
        training_curves([folder / "gone"])
    with pytest.raises(UsageError, match="not the log of a training"):
        (run / "log.jsonl").write_text("[1]\n")
        training_curves([run])
    with pytest.raises(UsageError, match="not what 'hspec costs --json' prints"):
        cost_curves(run / "log.jsonl")


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(folder: Path, tmp_path: Path, width: int, dark: bool) -> None:
    check_page(write_report(folder).read_text(encoding="utf-8"), tmp_path, width, dark)
