"""The one decoding loop, for every method and for none: propose, verify, accept, stop.

After a step the target has run every token before the anchor; the anchor is the last sampled token. A step drafts k tokens
behind the anchor, or a tree of them, runs ``[anchor, d_1 .. d_k]`` through the target in one forward, and keeps what the
acceptance rule allows. Without a drafter k is 0 and the same loop is plain decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hspec.decoding.clock import StepClock
from hspec.decoding.draft_sampler import DraftSampler
from hspec.decoding.processors import process
from hspec.decoding.proposal import Judged, Proposal, Tested
from hspec.decoding.randomness import Purpose, uniform
from hspec.decoding.sequence import Request, Result, Sequence
from hspec.decoding.state import DecodingState
from hspec.decoding.verify import verify_greedy, verify_sampled
from hspec.decoding.verify_tree import judge_tree, verify_tree_greedy
from hspec.drafters.context import Chooser, Draft, DraftContext
from hspec.drafters.tree import DraftTree
from hspec.errors import UsageError
from hspec.targets.cache import CacheShape, KVView
from hspec.targets.target import Target


class Drafter(Protocol):
    """What the loop needs of a drafter; :class:`hspec.drafters.drafter.Drafter` says what each does."""

    draft_ids: Tensor

    @property
    def taps(self) -> SequenceOf[int]: ...
    @property
    def max_draft(self) -> int: ...
    @property
    def max_nodes(self) -> int: ...
    @property
    def memory_shape(self) -> CacheShape | None: ...
    @property
    def reads_history(self) -> bool: ...
    def remember(
        self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None
    ) -> list[tuple[Tensor, Tensor]]: ...
    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft: ...


@dataclass(frozen=True)
class Step:
    """What one step gave one sequence, for streaming."""

    index: int
    """Which of the requests."""
    tokens: list[int]
    drafted: list[bool]
    text: str
    result: Result | None
    """Set with the request's last step."""


class Engine:
    """Decodes requests in batches; each request's text is independent of its neighbours.

    Args:
        drafter: None for plain decoding.
        k: drafted tokens a step, of a tree its depth; None takes the drafter's largest.
        max_batch: requests that run at once; more wait, and enter as others finish.
        clock: takes the time of every step, of the whole batch.

    Raises:
        UsageError: k is not one that the drafter was trained for, or no request may run.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, k: int | None = None, max_batch: int = 16,
        clock: StepClock | None = None,
    ):  # fmt: skip
        self.target, self.drafter, self.max_batch, self.clock = target, drafter, max_batch, clock
        self.k = 0 if drafter is None else drafter.max_draft if k is None else k
        if drafter is not None and not 1 <= self.k <= drafter.max_draft:
            raise UsageError(f"k = {self.k} drafted tokens, but this drafter was trained for 1 to {drafter.max_draft}")
        if max_batch < 1:
            raise UsageError(f"max_batch = {max_batch}, but at least one request must run at a time")
        self.taps = () if drafter is None else tuple(drafter.taps)
        self.staged = 1 + (0 if drafter is None else max(self.k, drafter.max_nodes))
        """Rows that a step stages at most."""

    # -- whole requests ------------------------------------------------------------------------------------------

    def generate(self, requests: SequenceOf[Request]) -> list[Result]:
        """Decode all requests; results in their order."""
        results: dict[int, Result] = {s.index: s.result for s in self.stream(requests) if s.result is not None}
        return [results[i] for i in range(len(requests))]

    def new_state(self, batch: int, tokens: int) -> DecodingState:
        """Room for ``batch`` sequences of ``tokens`` tokens, and for what a step stages behind them."""
        shape = None if self.drafter is None else self.drafter.memory_shape
        return DecodingState.new(self.target, shape, batch, tokens + self.staged)

    @torch.no_grad()
    def stream(self, requests: SequenceOf[Request], state: DecodingState | None = None, reuse: int = 0) -> Iterator[Step]:
        """Decode and give every step as it happens.

        Args:
            state: a :meth:`new_state` of one row to run a single request in, kept by the caller; its first ``reuse`` tokens
                are the prompt's and are not run again. Afterwards it holds the prompt and the emitted tokens but the last.

        Raises:
            UsageError: an empty prompt, or one that leaves no room in the target's context.
        """
        for request in requests:
            self._check(request)
        waiting = deque(enumerate(requests))
        if not requests:
            return
        if state is None:
            longest = max(len(request.prompt) + request.params.max_tokens for request in requests)
            state = self.new_state(min(self.max_batch, len(requests)), min(longest, self.target.max_positions))
        elif len(requests) != 1 or state.batch != 1 or not 0 <= reuse <= state.cache.lengths[0]:
            raise AssertionError(f"a kept state is for one request; {reuse} tokens to reuse, lengths are {state.cache.lengths}")
        running: list[tuple[int, Sequence]] = []
        while waiting or running:
            while waiting and len(running) < state.batch:
                index, request = waiting.popleft()
                sequence = self._admit(request, state, len(running), reuse)
                running.append((index, sequence))
                yield self._report(index, sequence, 1)
            self._retire(running, state)
            if running:
                emitted = self._step([s for _, s in running], state)
                for (index, sequence), count in zip(running, emitted, strict=True):
                    yield self._report(index, sequence, count)
                self._retire(running, state)

    def _check(self, request: Request) -> None:
        limit = self.target.max_positions
        if not request.prompt:
            raise UsageError("the prompt is empty: give at least one token")
        if len(request.prompt) >= limit:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens, the target's context is {limit}: shorten it by at least "
                f"{len(request.prompt) - limit + 1}"
            )
        bad = [t for t in request.prompt if not 0 <= t < self.target.vocab_size]
        if bad:
            raise UsageError(f"token {bad[0]} is not in the target's vocabulary of {self.target.vocab_size}")

    # -- one step ------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, state: DecodingState, row: int, reuse: int) -> Sequence:
        """Run a prompt into a row, and let the target choose the first anchor."""
        sequence = Sequence(request, self.target.tokenizer, self.target.eos_ids)
        state.set_length(row, reuse)  # at once, so that an interrupted prefill leaves nothing that looks valid
        own = state.rows(row, row + 1)
        tokens = torch.tensor([request.prompt[reuse:]], device=self.target.device)
        done = 0
        for output in self.target.prefill_chunks(tokens, own.cache, self.taps):
            known, done = done, done + output.hidden.shape[1]
            if done < tokens.shape[1]:
                self._remember(own, output.taps, tokens[:, known + 1 : done + 1])
        sequence.taps = output.taps[0, -1]
        verdict = self._judge(sequence, self.target.logits(output.hidden[:, -1]), [])
        self._remember(own, output.taps, torch.cat((tokens[:, known + 1 :], tokens.new_full((1, 1), verdict.token)), dim=1))
        state.set_length(row, own.cache.lengths[0])
        sequence.emit_first(verdict.token)
        self._stop_at_context(sequence)
        return sequence

    def _remember(self, state: DecodingState, taps: Tensor, following: Tensor) -> None:
        """Let a drafter that keeps something see the tokens behind ``state.memory``: taps ``[B, S, F, hidden]``."""
        if self.drafter is None or state.memory is None:
            return
        count = following.shape[1]
        lengths = torch.tensor(state.memory.lengths, device=following.device)
        positions = lengths[:, None] + torch.arange(count, device=following.device)
        state.keep(self.drafter.remember(taps[:, :count], following, positions, state.memory.view()))
        state.memory.advance([count] * state.batch)

    def _step(self, running: list[Sequence], state: DecodingState) -> list[int]:
        """Draft, verify and accept for every running sequence; returns how many tokens each emitted."""
        began = self.clock.now() if self.clock else 0.0
        used = state.rows(0, len(running))
        anchors = torch.tensor([[s.anchor] for s in running], device=self.target.device)
        draft = None if self.drafter is None else self._draft(self.drafter, running, used, anchors)
        drafted = self.clock.now() if self.clock else 0.0
        proposal = Proposal.of(anchors, draft, [self.target.max_positions - s.length - 2 for s in running])
        output = self.target.forward(proposal.tokens, used.cache, self.taps, proposal.depths)
        verdicts = self._verdicts(running, self.target.logits(output.hidden), proposal)
        accepted = proposal.accepted(verdicts)
        used.cache.keep_paths([verdict.rows for verdict in verdicts])
        if used.memory is not None:
            self._remember(used, _along(output.taps, verdicts), _following(accepted, verdicts, anchors.device))
        emitted = []
        for row, (sequence, verdict) in enumerate(zip(running, verdicts, strict=True)):
            sequence.taps = output.taps[row, verdict.rows[-1]]
            emitted.append(sequence.emit_step(accepted[row], verdict.token, proposal.refused(row, verdict)))
            state.set_length(row, sequence.length)
            self._stop_at_context(sequence)
        if self.clock:
            self.clock.add(began, drafted, self.clock.now())
        return emitted

    def _draft(self, drafter: Drafter, running: list[Sequence], used: DecodingState, anchors: Tensor) -> Draft | None:
        positions = [s.length for s in running]
        context = DraftContext(
            anchors=anchors,
            positions=torch.tensor(positions, device=anchors.device)[:, None],
            taps=torch.stack([s.taps for s in running if s.taps is not None])[:, None],
            kv=used.cache.view(),
            memory=used.memory_view(),
            history=tuple((*s.request.prompt, *s.tokens) for s in running) if drafter.reads_history else None,
        )
        histories = [self._history(s) for s in running]
        sampler = DraftSampler([s.params for s in running], positions, drafter.draft_ids, histories)
        draft = drafter.propose(context, self.k, sampler)
        nodes = max(map(len, draft.trees or ((),)))
        if nodes >= self.staged:
            raise AssertionError(f"a tree of {nodes} nodes by a drafter that gives {drafter.max_nodes} at most")
        return None if draft.counts is not None and not any(draft.counts) else draft

    def _verdicts(self, running: list[Sequence], logits: Tensor, proposal: Proposal) -> list[Judged]:
        if all(s.params.plain for s in running):
            chosen = zip(logits.argmax(-1).tolist(), proposal.tested, strict=True)
            return [verify_tree_greedy(t, d) if isinstance(d, DraftTree) else verify_greedy(t, d) for t, d in chosen]
        return [
            self._judge(s, logits[row, : len(tested) + 1], tested, None if proposal.q is None else proposal.q[row])
            for row, (s, tested) in enumerate(zip(running, proposal.tested, strict=True))
        ]

    def _judge(self, sequence: Sequence, logits: Tensor, tested: Tested, q: Tensor | None = None) -> Judged:
        """Apply the request's processors and acceptance rule to its ``[drafts + 1, vocabulary]`` logits."""
        params, history = sequence.params, self._history(sequence)
        first = len(sequence.request.prompt) + len(sequence.tokens)  # position of the first token to be emitted

        def uniforms(purpose: Purpose, depth: int) -> list[float]:
            return [uniform(params.seed, p, purpose) for p in range(first, first + depth + 1)]

        if isinstance(tested, DraftTree):
            return judge_tree(logits, params, history, tested, uniforms(Purpose.TARGET, max(tested.row_depths)))
        processed = process(logits, params, history, tested)
        if params.greedy:
            return verify_greedy(processed.argmax(-1).tolist(), tested)
        return verify_sampled(
            processed.softmax(-1),
            tested,
            None if params.drafts_greedily else q,
            None if self.drafter is None else self.drafter.draft_ids,
            uniforms(Purpose.ACCEPT, len(tested)),
            uniforms(Purpose.TARGET, len(tested)),
        )

    def _history(self, sequence: Sequence) -> Tensor | None:
        """Distinct tokens so far of a request that penalises them."""
        if sequence.params.repetition_penalty == 1.0:
            return None
        return torch.tensor(sorted({*sequence.request.prompt, *sequence.tokens}), device=self.target.device)

    def _stop_at_context(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None and sequence.length + 1 >= self.target.max_positions:
            sequence.finish_reason = "length"

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _retire(self, running: list[tuple[int, Sequence]], state: DecodingState) -> None:
        """Drop finished sequences; the last one takes a freed row, so that rows in use stay a prefix of the batch."""
        for row in range(len(running) - 1, -1, -1):
            if running[row][1].finish_reason is not None:
                last = len(running) - 1
                if row != last:
                    state.move_row(last, row)
                    running[row] = running[last]
                running.pop()

    def _report(self, index: int, sequence: Sequence, count: int) -> Step:
        done = sequence.finish_reason is not None
        result = sequence.result() if done else None
        text = sequence.text.take(final=done)
        return Step(index, sequence.tokens[-count:], sequence.drafted[-count:], text, result)


def _along(taps: Tensor, verdicts: list[Judged]) -> Tensor:
    """Of taps ``[B, rows, F, hidden]`` the rows that stand, ``[B, longest, F, hidden]``; what is behind a shorter sequence's is
    of no account."""
    longest = max(len(v.rows) for v in verdicts)
    rows = torch.tensor([[*v.rows, *[0] * (longest - len(v.rows))] for v in verdicts], device=taps.device)
    return taps[torch.arange(len(verdicts), device=taps.device)[:, None], rows]


def _following(accepted: list[list[int]], verdicts: list[Judged], device: torch.device) -> Tensor:
    """The token behind each row that stands, ``[B, longest]``: its accepted draft, or behind the last one the target's."""
    longest = max(map(len, accepted)) + 1
    rows = [[*own, v.token, *[0] * (longest - 1 - len(own))] for own, v in zip(accepted, verdicts, strict=True)]
    return torch.tensor(rows, device=device)
