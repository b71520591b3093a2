"""A real vLLM engine in a process of its own, driven step by step: what each request emits in each step can be seen.

The drafter multiplies in fp32 here (:mod:`tests.serving.watched`), so that its drafts can be compared with those of the embedded engine
step for step; in bf16 products (the default where a processor has them) near ties fall differently.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

K = 4


@dataclass(frozen=True)
class Job:
    """One request; ``params`` are those of ``vllm.SamplingParams``."""

    prompt: Sequence[int]
    params: dict[str, Any] = field(default_factory=dict)
    arrives: int = 0
    """Before which step of the engine."""
    aborted_at: int | None = None
    """After how many of its tokens."""


@dataclass
class Outcome:
    runs: list[list[int]] = field(default_factory=list)
    """Tokens of each step that emitted any."""
    drafts: list[list[int]] = field(default_factory=list)
    """What was drafted behind each of them ..."""
    drafted_at: list[int] = field(default_factory=list)
    """... and how many tokens there were then, the prompt's included."""
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for run in self.runs for token in run]

    @property
    def lengths(self) -> list[int]:
        return [len(run) for run in self.runs]


class VllmEngine:
    """A context: ``with VllmEngine(speculate=True) as engine: engine.run(jobs)``. One at a time fits in memory.

    Args:
        model: folder of a target, and its drafter's where drafts are wanted; by default SmolLM2 and the one that ships.
        settings: of ``vllm.LLM``; and ``drafts_at``, as ``hspec serve`` has it, and ``around``, what is put around the drafter.
    """

    def __init__(self, speculate: bool, model: tuple[str, str] | None = None, **settings: Any):
        self.speculate, self.model, self.settings = speculate, model, settings

    def __enter__(self) -> VllmEngine:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.speculate, self.model, self.settings))
        self._process.start()
        self.kv_tokens: int = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """All jobs to their end; outcomes in their order."""
        return self._ask("run", list(jobs))

    def metrics(self) -> dict[str, float]:
        """Counters since the start, by name."""
        return self._ask("metrics", None)

    def expand(self) -> list[float]:
        """``expand_batch_to_tokens([.7, 1, 0], [2, 3, 5], 0 -> 1)`` as the rejection sampler calls it."""
        return self._ask("expand", None)

    def _ask(self, what: str, argument: Any) -> Any:
        self._pipe.send((what, argument))
        return self._answer()

    def _answer(self) -> Any:
        failed, value = self._pipe.recv()
        if failed:
            raise RuntimeError(value)
        return value


def _serve(pipe: Any, speculate: bool, model: tuple[str, str] | None, settings: dict[str, Any]) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", VLLM_CPU_NUM_OF_RESERVED_CPU="0"
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    _bind(settings.get("tensor_parallel_size", 1))
    try:
        driver = _Driver(speculate, model, settings)
        pipe.send((False, driver.kv_tokens()))
        while (question := pipe.recv()) is not None:
            what, argument = question
            pipe.send((False, getattr(driver, what)(*([] if argument is None else [argument]))))
    except Exception:
        pipe.send((True, traceback.format_exc()))


def _bind(ranks: int) -> None:
    """Where one rank is bound to cores, all are to the same; otherwise each gets its part of those there are."""
    if ranks > 1:
        from hspec.serving.command import bindings

        own = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join([own] * ranks) if own else bindings(os.sched_getaffinity(0), ranks)


class _Driver:
    def __init__(self, speculate: bool, model: tuple[str, str] | None, settings: dict[str, Any]):
        from vllm import LLM

        from hspec.api import shipped_drafter
        from hspec.drafters.source import NOTHING
        from hspec.serving.schedule import Schedule
        from hspec.serving.settings import additional_config, speculative_config
        from hspec.targets.sources import model_folder

        target, drafter = model or (str(model_folder("smollm2")), str(shipped_drafter("smollm2")))
        fewer, around = settings.pop("drafts_at", None), settings.pop("around", NOTHING)
        drafting = speculative_config(K) | (
            {"num_speculative_tokens_per_batch_size": Schedule.of(fewer).ranges(K)} if fewer else {}
        )
        hspec = {"speculative_config": drafting, "additional_config": additional_config(Path(drafter), around)}
        defaults: dict[str, Any] = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 16, "disable_log_stats": False,
            "worker_extension_cls": "tests.serving.watched.Watched",
        }  # fmt: skip
        self.llm = LLM(target, **(defaults | settings | (hspec if speculate else {})))
        self.engine = self.llm.llm_engine
        self.count = 0
        self.speculate = speculate
        if speculate:
            self.llm.collective_rpc("watch")

    def _drafted(self, request: int) -> list[tuple[int, list[int], str]]:
        """See :mod:`tests.serving.watched`; on every rank the same, bit for bit."""
        if not self.speculate:
            return []
        first, *others = self.llm.collective_rpc("drafted", args=(request,))
        assert all(other == first for other in others), f"the ranks drafted {first} and {others}"
        return first

    def kv_tokens(self) -> int:
        cache = self.engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    def metrics(self) -> dict[str, float]:
        return {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}

    def expand(self) -> list[float]:
        import torch
        from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

        return expand_batch_to_tokens(torch.tensor([0.7, 1.0, 0.0]), torch.tensor([2, 3, 5]), 5, 0, 1).tolist()

    def run(self, jobs: list[Job]) -> list[Outcome]:
        outcomes = [Outcome() for _ in jobs]
        first, self.count = self.count, self.count + len(jobs)
        waiting, step = dict(enumerate(jobs)), 0
        while waiting or self.engine.has_unfinished_requests():
            for i in [i for i, job in waiting.items() if job.arrives <= step]:
                self._add(str(first + i), waiting.pop(i), outcomes[i])
            for output in self.engine.step():
                i = int(output.request_id.split("_")[-1]) - first
                _take(output, outcomes[i])
                limit = jobs[i].aborted_at
                if limit is not None and len(outcomes[i].tokens) >= limit and outcomes[i].finish_reason is None:
                    self.engine.abort_request([output.request_id])
                    outcomes[i].finish_reason = "aborted"
            step += 1
        for i, outcome in enumerate(outcomes):
            made = self._drafted(first + i)
            outcome.drafted_at, outcome.drafts = [known for known, *_ in made], [drafts for _, drafts, _ in made]
        return outcomes

    def _add(self, name: str, job: Job, outcome: Outcome) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params = dict(job.params)
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        try:
            self.engine.add_request(
                name,
                {"prompt_token_ids": list(job.prompt)},
                SamplingParams(**({"temperature": 0.0} | params), output_kind=RequestOutputKind.DELTA),
            )
        except VLLMValidationError as error:
            outcome.error = str(error)


def _take(output: Any, outcome: Outcome) -> None:
    for part in output.outputs:  # several for n > 1: kept in the order in which they come
        outcome.runs.append(list(part.token_ids))
        outcome.text += part.text
        outcome.finish_reason = part.finish_reason or outcome.finish_reason
        for alternatives in part.logprobs or ():
            outcome.logprobs.append({token: entry.logprob for token, entry in alternatives.items()})
