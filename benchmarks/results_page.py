"""docs/results.md from what was measured: no figure on that page is typed.

    python benchmarks/results_page.py collect study ~/study                  # a study, finished or not
    python benchmarks/results_page.py collect k-sweep ~/k-sweep              # a folder of 'hspec eval'
    python benchmarks/results_page.py collect serving ~/serving              # a folder of 'hspec bench serve'
    python benchmarks/results_page.py collect costs costs.json               # what a command printed with --json
    python benchmarks/results_page.py render                                 # docs/results/*.json + results.md.j2 -> docs/results.md

``collect NAME PLACE`` keeps in ``docs/results/NAME.json`` the little that the page needs; ``render`` alone reads only those.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from hspec.drafters.parameters import parameters_by_part
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.statistics import in_words
from hspec.evaluation.study import read_study
from hspec.evaluation.study_run import RESULT_FILE, is_done
from hspec.evaluation.throughput import NONE, SUMMARY_FILE
from hspec.files import write_text
from hspec.training.job import shape

ROOT = Path(__file__).parent.parent
DATA, PAGE, TEMPLATE = ROOT / "docs" / "results", ROOT / "docs" / "results.md", Path(__file__).with_name("results.md.j2")
KEPT = ("method", "k", "seeds", "tasks", "tau", "speedup", "acceptance", "draft_ms", "verify_ms", "ms_per_token", "ms_per_token_model",
        "drafter_kv_bytes", "tau_by_position", "tau_by_input", "tau_by_origin", "looping", "tokens", "steps")  # fmt: skip


# -- collecting --------------------------------------------------------------------------------------------------------


def collect(place: Path) -> Any:
    """The little that the page needs of a study's folder, an evaluation's, a bench's, or a JSON or JSONL file.

    Raises:
        UsageError: it is none of these.
    """
    if (place / "study.yaml").is_file():
        return of_study(place)
    if (place / "summary.json").is_file():
        return of_evaluation(json.loads((place / "summary.json").read_text(encoding="utf-8")))
    if (place / SUMMARY_FILE).is_file():
        bench = json.loads((place / SUMMARY_FILE).read_text(encoding="utf-8"))
        return rounded({key: value for key, value in bench.items() if key != "entrants"})  # folders of this machine
    if place.is_file():
        text = place.read_text(encoding="utf-8")
        if place.suffix == ".jsonl":  # of transfer.py; a target's name is its folder here
            return rounded([{k: v for k, v in json.loads(line).items() if k != "name"} for line in text.splitlines()])
        return rounded(json.loads(text))
    raise UsageError(f"{place}: not the folder of a study, an evaluation or a bench, and not a JSON file")


def of_evaluation(summary: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        name: {
            "prompts": found["prompts"],
            "entrants": {e: {key: about[key] for key in KEPT if key in about} for e, about in found["entrants"].items()},
            "pairs": [{key: value for key, value in pair.items() if key != "tasks"} for pair in found["pairs"]],
        }
        for name, found in summary["settings"].items()
    }
    return rounded(
        {"target": summary["target"], "dtype": summary["dtype"], "machine": summary["machine"], "settings": settings}
    )


def of_study(folder: Path) -> dict[str, Any]:
    """Every finished training by its last validation, with what it had come to on the way."""
    study = read_study(folder / "study.yaml")
    runs = []
    for piece in study.pieces():
        own = piece.folder(folder)
        if not is_done(own):
            continue
        log = [json.loads(line) for line in (own / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        held_out = [r for r in log if r["kind"] == "held-out"]
        last = held_out[-1]
        runs.append(
            {
                "label": piece.label, "seed": piece.seed, "blocks": last["blocks"], "core_seconds": last["core_seconds"],
                "parameters": sum(parameters_by_part(shape(study.job_of(piece))).values()),
                "loss": last["loss"], "tau": last["tau_sampling"], "tau_greedy": last["tau_greedy"],
                "acceptance": last["conditional"]["sampling"], "calibration_error": last.get("calibration", {}).get("ece"),
                "course": [[r["blocks"], r["core_seconds"], r["tau_sampling"]] for r in held_out],
            }
        )  # fmt: skip
    result = folder / RESULT_FILE
    whole = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None
    return rounded(
        {
            "trainings": len(study.pieces()),
            "job": study.job.model_dump(mode="json"),
            "runs": runs,
            "evaluation": None if whole is None else of_evaluation(whole["evaluation"]),
            "timing": None if whole is None else of_evaluation(whole["timing"]),
        }
    )


def rounded(value: Any) -> Any:
    """Floats to six figures: more are noise, and lines of a diff."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


# -- rendering ---------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def by_task(found: Mapping[str, Any], value: str = "tau") -> str:
    """Of one setting: tau or the speedup, a row a task, a column an entrant."""
    chosen = {n: e for n, e in found["entrants"].items() if e["method"] != "ar"}
    rows = [
        [task, str(n), *(in_words(e["tasks"][task][value]) for e in chosen.values())] for task, n in found["prompts"].items()
    ]
    rows.append(["**mean**", "", *(f"**{in_words(e[value])}**" for e in chosen.values())])
    return table(["task", "prompts", *chosen], rows)


def means(evaluation: Mapping[str, Any]) -> str:
    """A row an entrant, a column a setting."""
    settings = evaluation["settings"]
    names = dict.fromkeys(n for found in settings.values() for n, e in found["entrants"].items() if e["method"] != "ar")
    rows = [[n, *(in_words(f["entrants"][n]["tau"]) for f in settings.values())] for n in names]
    return table(["drafter", *(f"tau, {name}" for name in settings)], rows)


def acceptance(found: Mapping[str, Any]) -> str:
    """Conditional acceptance by draft position, a row an entrant."""
    chosen = {n: e for n, e in found["entrants"].items() if e.get("acceptance")}
    width = max(len(e["acceptance"]) for e in chosen.values())
    rows = [
        [n, *(f"{a['value']:.3f}" for a in e["acceptance"]), *[""] * (width - len(e["acceptance"]))] for n, e in chosen.items()
    ]
    return table(["drafter", *map(str, range(1, width + 1))], rows)


def bins(found: Mapping[str, Any], key: str, title: str) -> str:
    """Tau in bins, a row a bin, a column an entrant."""
    chosen = {n: e for n, e in found["entrants"].items() if e["method"] != "ar"}
    labels = dict.fromkeys(b["bin"] for e in chosen.values() for b in e[key])
    rows = []
    for label in labels:
        own = [next((b for b in e[key] if b["bin"] == label), None) for e in chosen.values()]
        rows.append([label, *("-" if b is None else in_words(b["tau"]) for b in own)])
    return table([title, *chosen], rows)


def pair(found: Mapping[str, Any], first: str, second: str) -> Mapping[str, Any]:
    """What was compared of these two."""
    return next(p for p in found["pairs"] if (p["a"], p["b"]) == (first, second))


def pairs(found: Mapping[str, Any], first: str = "") -> str:
    """Ratios of tau, first against second; of ``first`` alone, if that is given."""
    rows = [
        [f"{p['a']} / {p['b']}", in_words(p["tau_ratio"], 3), p["tau_ratio"]["verdict"], str(p["prompts_for_5_percent"] or "?")]
        for p in found["pairs"]
        if first in ("", p["a"])
    ]
    return table(["pair", "tau ratio", "first is", "prompts to see 5 %"], rows)


def trainings(study: Mapping[str, Any]) -> str:
    """A row a training: what it cost and came to by its own validation."""
    rows = []
    for r in sorted(study["runs"], key=lambda r: -r["tau"]):
        error = r["calibration_error"]
        made = [
            f"{r['parameters'] / 1e6:.1f} M",
            f"{r['blocks']:,}",
            f"{r['core_seconds'] / 60:.1f}",
            f"{r['blocks'] / r['core_seconds']:.0f}",
        ]
        found = [f"{r['loss']:.3f}", f"{r['tau']:.3f}", f"{r['tau_greedy']:.3f}", "-" if error is None else f"{error:.3f}"]
        rows.append([r["label"], str(r["seed"]), *made, *found])
    header = [
        "method",
        "seed",
        "parameters",
        "blocks",
        "core minutes",
        "blocks a core-second",
        "held-out loss",
        "tau (estimate, T = 1)",
        "greedy",
        "calibration error",
    ]
    return table(header, rows)


def courses(study: Mapping[str, Any], marks: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> str:
    """Estimated tau on the way, at shares of the blocks: linear between the validations before and after, from 1 at none."""
    rows = []
    for r in study["runs"]:
        blocks, taus = [0, *(c[0] for c in r["course"])], [1.0, *(c[2] for c in r["course"])]
        rows.append([f"{r['label']} {r['seed']}", *(f"{np.interp(mark * r['blocks'], blocks, taus):.3f}" for mark in marks)])
    return table(["training", *(f"{mark:.0%} of the blocks" for mark in marks)], rows)


def positions(study: Mapping[str, Any]) -> str:
    """Conditional acceptance by position in validation, a row a training."""
    width = max(len(r["acceptance"]) for r in study["runs"])
    rows = [[f"{r['label']} {r['seed']}", *("-" if a is None else f"{a:.3f}" for a in r["acceptance"])] for r in study["runs"]]
    return table(["training", *map(str, range(1, width + 1))], rows)


def over_seeds(study: Mapping[str, Any], first: str) -> str:
    """A row a method: the estimated tau of its seeds after all blocks and after the time of the study's quickest training, and how much
    ``first`` is ahead of it with the same seed, which means the same documents in the same order."""
    shortest = min(r["core_seconds"] for r in study["runs"])
    taus: dict[str, dict[int, tuple[float, float]]] = {}
    for r in study["runs"]:
        times, on_the_way = [0.0, *(c[1] for c in r["course"])], [1.0, *(c[2] for c in r["course"])]
        taus.setdefault(r["label"], {})[r["seed"]] = (r["tau"], float(np.interp(shortest, times, on_the_way)))
    rows = []
    for label, own in sorted(taus.items(), key=lambda item: -np.mean([tau for tau, _ in item[1].values()])):
        row = [label, str(len(own))]
        for which in (0, 1):
            row.append(_mean_and_range([tau[which] for tau in own.values()]))
            ahead = [taus[first][seed][which] - tau[which] for seed, tau in own.items() if seed in taus[first]]
            row.append("-" if label == first else _mean_and_range(ahead))
        rows.append(row)
    ahead = f"{first} is ahead by"
    return table(["method", "seeds", "tau, equal blocks", ahead, f"tau, equal time ({shortest:.0f} core-seconds)", ahead], rows)


def ahead_by(study: Mapping[str, Any], first: str, second: str) -> float:
    """Of estimated tau, on average over the seeds that both have."""
    taus = [{r["seed"]: r["tau"] for r in study["runs"] if r["label"] == label} for label in (first, second)]
    return float(np.mean([taus[0][seed] - taus[1][seed] for seed in taus[0].keys() & taus[1].keys()]))


def _mean_and_range(values: Sequence[float]) -> str:
    return f"{values[0]:.3f}" if len(values) == 1 else f"{np.mean(values):.3f} ({min(values):.3f} .. {max(values):.3f})"


def first_seeds(study: Mapping[str, Any], labels: Sequence[str] = ()) -> str:
    """The estimated tau of each method's first seed, the largest first, in a sentence's words; of ``labels`` only, as far as they are
    there."""
    first = {r["label"]: r["tau"] for r in reversed(study["runs"]) if not labels or r["label"] in labels}
    return ", ".join(f"{label} {tau:.3f}" for label, tau in sorted(first.items(), key=lambda item: -item[1]))


def estimate(study: Mapping[str, Any], label: str, seed: int) -> float:
    """A training's estimated tau."""
    return next(r["tau"] for r in study["runs"] if (r["label"], r["seed"]) == (label, seed))


def repeats(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> str:
    """A row a training that both studies have: its estimated tau in each."""
    taus = {(r["label"], r["seed"]): r["tau"] for r in later["runs"]}
    rows = [
        [r["label"], f"{r['tau']:.3f}", f"{taus[r['label'], r['seed']]:.3f}", f"{taus[r['label'], r['seed']] - r['tau']:+.3f}"]
        for r in sorted(earlier["runs"], key=lambda r: -r["tau"])
        if (r["label"], r["seed"]) in taus
    ]
    return table(["method", "earlier", "here", "difference"], rows)


def drafting(found: Mapping[str, Any], k: int) -> dict[str, Any]:
    """Of a setting the entrants that draft k tokens."""
    return {**found, "entrants": {name: e for name, e in found["entrants"].items() if e["k"] == k}}


def throughputs(bench: Mapping[str, Any]) -> str:
    """A row a concurrency, a column a method: tokens a second, over those without drafts (the rounds' least .. most), and tau."""
    methods = bench["methods"]
    rows = []
    for concurrency in methods[NONE]:
        row = [concurrency]
        for name, cells in methods.items():
            cell = cells[concurrency]
            said = f"{cell['throughput']:.1f}"
            if name != NONE:
                tau = "" if cell["tau"] is None else f"; tau {cell['tau']:.2f}"
                said += f" ({cell['ratio']:.2f}x, {min(cell['ratios']):.2f} .. {max(cell['ratios']):.2f}{tau})"
            row.append(said)
        rows.append(row)
    return table(["at once", *methods], rows)


def rounds(bench: Mapping[str, Any]) -> str:
    """How many there were, in words: a bench that was stopped may have fewer than were planned, and more of some methods."""
    counts = [cell["rounds"] for cells in bench["methods"].values() for cell in cells.values()]
    least, most = min(counts), max(counts)
    return f"{least} round{'s' if least > 1 else ''}" if least == most else f"{least} to {most} rounds"


def leads(bench: Mapping[str, Any], name: str, others: Sequence[str]) -> str:
    """At which concurrencies a method's throughput is above all the others' in every round that they have in common."""
    methods = bench["methods"]
    found = [
        concurrency
        for concurrency, cell in methods[name].items()
        if all(
            mine > theirs
            for other in others
            for mine, theirs in zip(cell["throughput_all"], methods[other][concurrency]["throughput_all"], strict=False)
        )
    ]
    return "no concurrency" if not found else ", ".join(found[:-1]) + (" and " if found[1:] else "") + found[-1]


def rooms(bench: Mapping[str, Any]) -> str:
    """A row a method: tokens that the KV cache has room for, and what was held and preempted at each concurrency."""
    rows = []
    for name, cells in bench["methods"].items():
        room = next(iter(cells.values()))["kv_tokens"]
        held = [f"{100 * cell['kv_peak']:.0f} %, {cell['preemptions']}" for cell in cells.values()]
        rows.append([name, f"{room:,}", *held])
    return table(["method", "room for tokens", *(f"C = {c}" for c in bench["methods"][NONE])], rows)


def drafting_costs(costs: Mapping[str, Any], length: int) -> str:
    """At a context length, a row a method, a column a number of sequences: ms a step of drafting, injection included."""
    found = [c for c in costs["drafting"] if c["length"] == length]
    counts, names = (dict.fromkeys(c[key] for c in found) for key in ("concurrency", "method"))
    cells = {(c["method"], c["concurrency"]): c for c in found}
    rows = [[name, *(_in_parts(cells[name, n]) for n in counts)] for name in names]
    return table([f"{length} tokens", *(f"{n} at once" for n in counts)], rows)


def verification_costs(costs: Mapping[str, Any]) -> str:
    """A row a context length, a column a number of rows: ms of the target's forward over one sequence."""
    found = {(c["length"], c["rows"]): c["ms"] for c in costs["verification"]}
    lengths, heights = (sorted({key[i] for key in found}) for i in (0, 1))
    rows = [[f"{length} tokens", *(f"{found[length, n]:.1f}" for n in heights)] for length in lengths]
    return table(["verifying", *(f"{n} row{'s' if n > 1 else ''}" for n in heights)], rows)


def growth(costs: Mapping[str, Any], method: str, concurrency: int) -> float:
    """How many times as long a step of drafting takes at the longest context as at the shortest."""
    own = {c["length"]: c["total_ms"] for c in costs["drafting"] if (c["method"], c["concurrency"]) == (method, concurrency)}
    return float(own[max(own)] / own[min(own)])


def _in_parts(cost: Mapping[str, Any]) -> str:
    whole = f"{cost['total_ms']:.1f}"
    return f"{whole} ({cost['inject_ms']:.1f} of them to inject)" if cost["inject_ms"] else whole


def transfer(found: Sequence[Mapping[str, Any]]) -> str:
    """Rows of ``transfer.py --json``."""
    rows = []
    for r in found:
        ratio = r["over_first"]
        numbers = [str(r["prompts"]), in_words(r["tau"]), in_words(ratio, 3), ratio["verdict"]]
        rows.append([r["drafter"], r["setting"], r["target"], *numbers])
    return table(["drafter", "setting", "target", "prompts", "tau", "over the first target", ""], rows)


def render() -> str:
    """The page.

    Raises:
        HSpecError: the template names what is not there.
    """
    data = {path.stem.replace("-", "_"): json.loads(path.read_text(encoding="utf-8")) for path in sorted(DATA.glob("*.json"))}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    tools = (
        by_task,
        means,
        acceptance,
        bins,
        pair,
        pairs,
        trainings,
        positions,
        courses,
        over_seeds,
        ahead_by,
        first_seeds,
        repeats,
        estimate,
        drafting,
        transfer,
        in_words,
        throughputs,
        rooms,
        leads,
        rounds,
        drafting_costs,
        verification_costs,
        growth,
    )
    try:
        return environment.get_template(TEMPLATE.name).render(**{tool.__name__: tool for tool in tools}, data=data)
    except jinja2.UndefinedError as error:
        raise HSpecError(f"{TEMPLATE.name}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("name")
    collecting.add_argument("place", type=Path)
    commands.add_parser("render")
    given = parser.parse_args()
    try:
        if given.command == "collect":
            write_text(DATA / f"{given.name}.json", json.dumps(collect(given.place), indent=1) + "\n")
        else:
            write_text(PAGE, render())
    except HSpecError as error:
        sys.exit(f"results_page: {error}")


if __name__ == "__main__":
    main()
