"""From settings to a run: strict keys, overrides, the plan, and a held-out part that is never trained on."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from hspec.drafters.checkpoint import load_drafter
from hspec.drafters.convert import convert
from hspec.errors import HSpecError, UsageError
from hspec.targets.sources import load_target
from hspec.training.build import build
from hspec.training.checkpoints import STATE_FILE, Checkpoints
from hspec.training.config import GrowthStage
from hspec.training.data import held_out_prompts, prepare_data
from hspec.training.job import Job, override, read_job, shape
from hspec.training.plan import RUN_FILE, check_run, plan
from tests.saved import held_out_numbers, save_drafter_for, save_target, write_exchanges
from tests.tiny import tiny_target

COUNT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("job")
    save_target(place / "target")
    write_exchanges(place / "data.jsonl", COUNT)
    (place / "tiny.yaml").write_text("{fusion_rank: 16, intermediate_size: 32, block_size: 4, head: {kind: markov, rank: 4}}")
    return place


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))


def job(folder: Path, **changes: Any) -> Job:
    values = {
        "target": str(folder / "target"), "preset": str(folder / "tiny.yaml"), "data": [str(folder / "data.jsonl")],
        "own_answers": False, "train": {"steps": 2, "batch_tokens": 200, "max_tokens": 120, "objective_chunk": 64},
    }  # fmt: skip
    return Job.model_validate(values | changes)


def quiet(_: str) -> None:
    pass


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "stepz: unknown key; known are target, method, preset, data"),
        ("train: {stepz: 3}", "train.stepz: unknown key; known are steps, batch_tokens"),
        ("answers: {temp: 1}", "answers.temp: unknown key; known are temperatures, max_tokens"),
        ("train: {growth: [{start: 0, slots: 1, density: 1, x: 1}]}", "train.growth.0.x: unknown key; known are start, slots"),
        ("train: {steps: -1}", "train.steps: Input should be greater than 0"),
        ("train: {steps: many}", "train.steps: Input should be a valid integer"),
        ("train: {growth: [{start: 0.5, slots: 1, density: 1}]}", "train: growth must start at 0 and ascend, not [0.5]"),
        ("train: {warm_kl_until: 0.9}", "tv_from (0.7) must not come before warm_kl_until (0.9)"),
        ("max_prompts: 0", "max_prompts: Input should be greater than 0"),
        ("data: []", "data: Tuple should have at least 1 item"),
        ("answers: {temperatures: [-1.0]}", "answers.temperatures.0: Input should be greater than or equal to 0"),
        ("train: {seed: -1}", "train.seed: Input should be greater than or equal to 0"),
        ("- a", "the whole: Input should be a valid dictionary"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_job(path)
    assert str(path) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the settings in .*none\.yaml: No such file"):
        read_job(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not YAML"):
        read_job(tmp_path / "binary.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert read_job(tmp_path / "empty.yaml") == Job()


def test_options_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("target: one\nmax_prompts: 5\ntrain: {steps: 10, seed: 3}\n")
    settings = read_job(tmp_path / "a.yaml")
    changed = override(settings, train={"steps": 20, "seed": None, "precision": "bf16"}, target="two", max_prompts=None)
    assert (changed.target, changed.max_prompts) == ("two", 5)
    assert (changed.train.steps, changed.train.seed, changed.train.precision) == (20, 3, "bf16")
    assert override(settings, train={}) == settings


@pytest.mark.parametrize(
    ("train", "given", "message"),
    [
        ({"steps": 0}, {}, "--steps: Input should be greater than 0, not 0"),
        ({"precision": "fp8"}, {}, "--precision: Input should be 'fp32' or 'bf16', not 'fp8'"),
        ({}, {"max_prompts": -3}, "--max-prompts: Input should be greater than 0, not -3"),
    ],
)
def test_a_wrong_option_is_named(train: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        override(Job(), train=train, **given)


# -- the plan ----------------------------------------------------------------------------------------------------


def test_the_plan_needs_neither_target_nor_data(tmp_path: Path) -> None:
    lines = plan(Job(), tmp_path / "new" / "run").lines
    assert "smollm2 (preset auto; mamba mlp" in lines["target"]
    assert lines["trainable parameters"].startswith("15.") or "M: " in lines["trainable parameters"]
    assert "1 -> 2 -> 4 slots" in lines["steps"] and "sharegpt" in lines["data"] and "--max-prompts" in lines["data"]
    assert not (tmp_path / "new").exists() and not (tmp_path / "cache").exists()


def test_the_plan_of_another_target(folder: Path, tmp_path: Path) -> None:
    lines = plan(job(folder, max_prompts=7), tmp_path).lines
    assert "1 -> 2 -> 3 slots" in lines["steps"] and "at most 7 prompts; answers as in the data" in lines["data"]
    grown = job(folder, train={"growth": [GrowthStage(start=0, slots=6, density=1.0)]})
    assert shape(grown).max_draft == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ["gone.jsonl"]}, "no data file at gone.jsonl"),
        ({"preset": "gone"}, "no preset 'gone'"),
        ({"preset": "qwen3-8b"}, "preset qwen3-8b is for Qwen/Qwen3-8B"),
        ({"init_from": "gone"}, "no drafter at gone"),
        ({"train": {"growth": [{"start": 0, "slots": 40, "density": 1}]}}, "growth: 40 slots: block_size"),
    ],
)
def test_the_plan_finds_what_is_missing_before_anything_is_loaded(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        plan(job(folder, **changes), tmp_path)


def test_a_disk_that_is_too_small(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(HSpecError, match=r"the run keeps about \d+ MB in .*, only 0 MB are free there"):
        plan(job(folder), tmp_path)


def test_where_a_run_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file, a folder is needed"):
        check_run(tmp_path / "file" / "run", resume=False)
    with pytest.raises(UsageError, match="nothing to resume"):
        check_run(tmp_path, resume=True)
    for name in ("config.json", "model.safetensors"):  # a drafter, or a target
        (tmp_path / name).write_text("")
        with pytest.raises(UsageError, match="holds a model, which the run would overwrite: choose another --out"):
            check_run(tmp_path, resume=False)
        (tmp_path / name).unlink()
    (tmp_path / STATE_FILE).write_text("")
    with pytest.raises(UsageError, match=r"state\.pt was written by an earlier version, .* with --init-from"):
        check_run(tmp_path, resume=True)
    with pytest.raises(UsageError, match="already holds a run: go on with --resume"):
        check_run(tmp_path, resume=False)
    Checkpoints(tmp_path).write(1, {})
    check_run(tmp_path, resume=True)
    with pytest.raises(UsageError, match="already holds a run: go on with --resume"):
        check_run(tmp_path, resume=False)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UsageError, match="no permission to write"):
        check_run(tmp_path, resume=True)


# -- data --------------------------------------------------------------------------------------------------------


def numbers(examples: list[Any], folder: Path) -> set[int]:
    """Which questions the documents ask."""
    tokenizer = load_target(str(folder / "target")).tokenizer
    texts = [tokenizer.decode(e.tokens) for e in examples]
    return {int(re.search(r"user\n(\d+):", t).group(1)) for t in texts}  # type: ignore[union-attr]


@pytest.mark.parametrize("own_answers", [False, True])
def test_the_held_out_part_is_never_trained_on(folder: Path, own_answers: bool) -> None:
    target = load_target(str(folder / "target"))
    settings = job(folder, own_answers=own_answers, answers={"max_tokens": 6, "batch": 16})
    said: list[str] = []
    data = prepare_data(settings, target, said.append)
    held = held_out_numbers(COUNT)
    assert held and numbers(data.held_out, folder) == held
    assert numbers(data.train, folder) == set(range(COUNT)) - held
    assert any("60 prompts kept of 60" in line for line in said)
    assert {p.text for p in held_out_prompts(target, settings.data, 100)} >= {
        f"{n}: what is the name of number {n}?" for n in held
    }


def test_own_answers_are_kept_and_not_mixed_with_others(folder: Path, tmp_path: Path) -> None:
    target = load_target(str(folder / "target"))

    def prepare(**changes: Any) -> tuple[list[list[int]], list[str]]:
        said: list[str] = []
        settings = job(folder, own_answers=True, answers={"max_tokens": 5, "batch": 16, **changes}, max_prompts=6)
        data = prepare_data(settings, target, said.append)
        return [e.tokens for e in data.train], said

    first, said = prepare()
    assert len(first) == 6 and "6 answers written now" in said
    again, said = prepare()
    assert again == first and said.count("0 answers written now") == 2
    other, said = prepare(seed=1)
    assert "6 answers written now" in said and "0 answers written now" in said  # the held-out ones are for all
    assert other != first and prepare()[0] == first


def test_given_answers_may_be_limited(folder: Path) -> None:
    target = load_target(str(folder / "target"))
    assert len(prepare_data(job(folder, max_prompts=5), target, quiet).train) == 5


def test_data_without_answers_or_prompts(folder: Path, tmp_path: Path) -> None:
    target = load_target(str(folder / "target"))
    (tmp_path / "a.txt").write_text("\n".join(f"{n}: what is the name of number {n}?" for n in range(5)))
    with pytest.raises(HSpecError, match=r"none of the 5 conversations for training has an answer.*--own-answers"):
        prepare_data(job(folder, data=[str(tmp_path / "a.txt")]), target, quiet)
    (tmp_path / "b.txt").write_text("x\ny\n")
    with pytest.raises(HSpecError, match="no prompt is left after cleaning"):
        prepare_data(job(folder, data=[str(tmp_path / "b.txt")]), target, quiet)
    with pytest.raises(HSpecError, match="none of the 0 usable prompts is held out"):
        held_out_prompts(target, [str(tmp_path / "b.txt")], 5)


# -- the run -----------------------------------------------------------------------------------------------------


def test_a_job_is_built_saved_and_resumed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = job(folder)
    trainer = build(settings, out, False, quiet)
    assert read_job(out / RUN_FILE) == settings
    trainer.run(lambda _: None, lambda: trainer.step == 1)
    with pytest.raises(UsageError, match="already holds a run"):
        build(settings, out, False, quiet)
    assert plan(read_job(out / RUN_FILE), out, resume=True).lines["target"]
    resumed = build(read_job(out / RUN_FILE), out, True, quiet)
    assert resumed.step == 1
    resumed.run(lambda _: None)
    undisturbed = build(settings, tmp_path / "other", False, quiet)
    undisturbed.run(lambda _: None)
    for name, weight in undisturbed.drafter.named_parameters():
        assert torch.equal(weight, dict(resumed.drafter.named_parameters())[name]), name
    drafter = load_drafter(out, load_target(settings.target))
    assert drafter.max_draft == 3 and drafter.config.target.weight_hash


def test_other_settings_are_noticed_before_data_is_prepared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(job(folder), tmp_path / "run", False, quiet)
    trainer.run(lambda _: None, lambda: trainer.step == 1)
    other = job(folder).model_copy(update={"train": job(folder).train.model_copy(update={"seed": 3, "keep": 9})})
    monkeypatch.setattr("hspec.training.build.prepare_data", lambda *_: pytest.fail("too late"))
    with pytest.raises(
        HSpecError, match=r"step-00000001 belongs to a run with other settings: seed was 0, is 3\. Put them back"
    ):
        build(other, tmp_path / "run", True, quiet)


def test_the_block_that_is_saved_is_the_one_that_was_trained(folder: Path, tmp_path: Path) -> None:
    growth = [{"start": 0, "slots": 2, "density": 1}]
    trainer = build(job(folder, train={"steps": 1, "growth": growth}), tmp_path / "run", False, quiet)
    assert trainer.drafter.max_draft == 2  # although the preset has 3


def test_starting_from_a_drafter(folder: Path, tmp_path: Path) -> None:
    target = load_target(str(folder / "target"))
    start = save_drafter_for(target, tmp_path / "start", block_size=3)
    settings = job(folder, init_from=str(start), train={"steps": 1, "growth": [{"start": 0, "slots": 4, "density": 1}]})
    trainer = build(settings, tmp_path / "run", False, quiet)
    assert trainer.drafter.max_draft == 4 and trainer.slots == 4
    loaded = load_drafter(start, target)
    assert torch.equal(trainer.drafter.norm.weight, loaded.norm.weight)
    assert torch.equal(trainer.drafter.draft_ids, loaded.draft_ids)
    trainer.run(lambda _: None)
    for file in start.iterdir():
        file.unlink()
    assert build(settings, tmp_path / "run", True, quiet).step == 1  # what it began from is not needed any more


def test_targets_that_cannot_be_trained_on(folder: Path, tmp_path: Path) -> None:
    save_target(tmp_path / "base", chat_template=False)
    with pytest.raises(UsageError, match="has no chat template"):
        build(job(folder, target=str(tmp_path / "base")), tmp_path / "run", False, quiet)
    other = tiny_target(layers=4, hidden=48)
    start = save_drafter_for(other, tmp_path / "start")
    with pytest.raises(UsageError, match=r"made for tiny-llama \(layers 4\), not for"):
        build(job(folder, init_from=str(start)), tmp_path / "run", False, quiet)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_at_the_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        self.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(HSpecError, match=r"cannot write .*run\.yaml: No space left on device"):
        build(job(folder), tmp_path / "run", False, quiet)
    assert list((tmp_path / "run").iterdir()) == []


def test_the_saved_settings_are_plain_yaml(folder: Path, tmp_path: Path) -> None:
    build(job(folder), tmp_path / "run", False, quiet)
    raw = yaml.safe_load((tmp_path / "run" / RUN_FILE).read_text())
    assert raw["train"]["steps"] == 2 and raw["data"] == [str(folder / "data.jsonl")]


@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3", "peagle"])
def test_what_is_trained_can_be_written_for_servers(folder: Path, tmp_path: Path, method: str) -> None:
    run = build(job(folder, method=method), tmp_path / "run", False, quiet)
    run.run(lambda record: None)
    target = load_target(str(folder / "target"))
    done = convert(tmp_path / "run", tmp_path / "out", "speculators", target, mask_token_id=2)
    assert done.max_difference < 1e-4
    assert load_drafter(tmp_path / "out", target).max_draft == load_drafter(tmp_path / "run", target).max_draft
    # And what a server's file holds can be trained on.
    on = job(folder, init_from=str(tmp_path / "out"), train={"steps": 1})
    assert "slots" in plan(on, tmp_path / "on").lines["compute"]
    further = build(on, tmp_path / "on", False, quiet)
    assert further.drafter.config.method == method
    before = {name: p.detach().clone() for name, p in further.drafter.named_parameters()}
    started = load_drafter(tmp_path / "out", target).state_dict()
    assert all(torch.equal(before[name], started[name]) for name in before)
    further.run(lambda record: None)
    assert load_drafter(tmp_path / "on", target).config.method == method


def test_recipes_go_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_job(Path("qwen3-4b")).target == "Qwen/Qwen3-4B"
    (tmp_path / "qwen3-4b").write_text("target: mine")  # a file of the user's own comes first
    assert read_job(Path("qwen3-4b")).target == "mine"
    with pytest.raises(UsageError, match="cannot read the settings in qwen3-5b"):
        read_job(Path("qwen3-5b"))


# -- several sources, and a server -------------------------------------------------------------------------------


def test_sources_are_mixed_by_weight_and_share_one_split(folder: Path, tmp_path: Path) -> None:
    """A prompt that two sources have in other words comes once, and is held out for both or for none."""
    target = load_target(str(folder / "target"))
    write_exchanges(tmp_path / "b.jsonl", 90)
    text = (tmp_path / "b.jsonl").read_text().replace("what is the name", "WHAT is the  name")
    (tmp_path / "b.jsonl").write_text(text)
    sources = [{"source": str(folder / "data.jsonl"), "weight": 3}, {"source": str(tmp_path / "b.jsonl"), "weight": 1}]
    said: list[str] = []
    data = prepare_data(job(folder, data=sources, max_prompts=40), target, said.append)
    held = held_out_numbers(90)
    assert numbers(data.held_out, folder) == held and not numbers(data.train, folder) & held
    assert data.train.weights == (3, 1) and data.train.sources.tolist().count(0) == 30 and len(data.train) == 40
    assert any("60 duplicates" in line for line in said)
    assert any(f"30 of {folder / 'data.jsonl'}, 10 of {tmp_path / 'b.jsonl'}" in line for line in said)
    again = prepare_data(job(folder, data=sources, max_prompts=40), target, quiet)
    assert again.train.fingerprint() == data.train.fingerprint()
    with pytest.raises(HSpecError, match="has a weight but no prompt to train on"):
        prepare_data(job(folder, data=[sources[0], {**sources[0], "source": str(folder / "data.jsonl")}]), target, quiet)


def test_the_thinking_mode_is_known_to_the_template_or_refused(folder: Path) -> None:
    target = load_target(str(folder / "target"))
    with pytest.raises(UsageError, match=r"answers\.thinking: on, but the target's chat template has no enable_thinking"):
        prepare_data(job(folder, own_answers=True, answers={"thinking": "on"}), target, quiet)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"model": "x"}, "model and api_key_env are a server's"),
        ({"server": "localhost:8000"}, "must begin with http:// or https://"),
        ({"thinking": "maybe"}, "Input should be 'default', 'on' or 'off'"),
        ({"server": "http://a", "concurrency": 0}, "greater than 0"),
    ],
)
def test_settings_of_a_server_that_make_no_sense(answers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Job.model_validate({"answers": answers})


def test_a_drafter_that_cannot_end_a_turn_is_not_trained_on(folder: Path, tmp_path: Path) -> None:
    target = load_target(str(folder / "target"))
    start = save_drafter_for(target, tmp_path / "start")
    weights = load_file(start / "drafter.safetensors")
    name = next(n for n in weights if "draft_ids" in n)
    weights[name] = weights[name] + 3  # ids from 3 on: no special token
    save_file(weights, start / "drafter.safetensors")
    with pytest.raises(UsageError, match="none of the target's EOS tokens"):
        build(job(folder, init_from=str(start)), tmp_path / "run", False, quiet)
