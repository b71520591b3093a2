"""The target answers at a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp and others).

The server says text. Its tokens are found by encoding it again with the target's own tokenizer: they need not be those that were
drawn, but they spell the same text, or the answer is left out.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from requests import RequestException, Response, Session
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from hspec.training.answers import AnswerSettings, short_prompts
from hspec.training.prompts import Prompt

RETRIES = 6
SILENT_RETRIES = 2
"""When a request was received but no reply came."""
BACKOFF = 1.0
"""Seconds before the second retry; each further one waits twice as long, or as long as the server asks."""
BAD_IN_A_ROW = 8
"""So many replies without an answer, one after the other, and the server is given up. The first reply must have one."""

_TRY_AGAIN = (408, 429, 500, 502, 503, 504)
_REFUSED = {401: "the key was not accepted", 403: "the key was not accepted", 404: "there is no such page or model"}

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Server:
    """Where it is, and how it is asked."""

    url: str
    """With or without ``/v1``."""
    concurrency: int = 16
    """Prompts that it has at once."""
    api_key_env: str | None = None
    """The environment variable that holds its key."""
    timeout: float = 600.0
    """Seconds that it may stay silent."""

    def page(self, name: str) -> str:
        base = self.url.rstrip("/")
        return f"{base if base.endswith('/v1') else base + '/v1'}/{name}"

    def session(self) -> Session:
        """Tries again what may pass: a busy server, its own errors, a broken connection, silence.

        Raises:
            UsageError: the key is not in the environment.
        """
        session = Session()
        again = Retry(
            RETRIES,
            read=SILENT_RETRIES,
            backoff_factor=BACKOFF,
            status_forcelist=_TRY_AGAIN,
            allowed_methods=None,
            raise_on_status=False,
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=again, pool_maxsize=self.concurrency))
        if self.api_key_env is not None:
            if not (key := os.environ.get(self.api_key_env)):
                raise UsageError(
                    f"answers.api_key_env: there is no {self.api_key_env} in the environment: set it to the server's key"
                )
            session.headers["Authorization"] = f"Bearer {key}"
        return session


class _NoAnswerError(Exception):
    """A reply that has no answer that could be trained on; the message says why, in words that are counted."""


class ServerAnswers:
    """An answerer (see :class:`hspec.training.answers.Answerer`) that asks a server.

    Args:
        target: what the server runs, too; here only its tokenizer is used, and the length of its context.
    """

    def __init__(self, target: Target, server: Server, template: ChatTemplate | None = None):
        self.target, self.server, self.template = target, server, template or target.template
        self._session = server.session()
        self._end = _end_of_turn(self.template)
        self.left_out: Counter[str] = Counter()
        """Why prompts have no answer, and how many."""

    def only_model(self) -> str:
        """The name under which the server has its only model.

        Raises:
            UsageError: it has several.
            HSpecError: it does not answer, or not as such a server does.
        """
        where = self.server.page("models")
        try:
            listed = _json(self._ask("GET", "models"))
            names = [str(row["id"]) for row in listed["data"]]
        except (_NoAnswerError, LookupError, TypeError) as error:
            raise HSpecError(
                f"{where} does not list models ({error}): is it such a server? If so, name one in answers.model"
            ) from error
        if len(names) != 1:
            raise UsageError(f"{self.server.url} has {len(names)} models ({', '.join(names)}): name one in answers.model")
        return names[0]

    def __call__(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> Iterator[dict[str, Any]]:
        short = list(short_prompts(self.target, self.template, prompts, settings.max_prompt_tokens))
        bad = BAD_IN_A_ROW - 1  # nothing is known of the server yet: its first reply decides
        for part in (short[:1], short[1:]):
            for (prompt, ids), said in _in_parallel(lambda item: self._said(*item, settings), part, self.server.concurrency):
                try:
                    record = self._record(prompt, ids, said, settings)
                except _NoAnswerError as error:
                    bad += 1
                    self.left_out[str(error)] += 1
                    if bad == BAD_IN_A_ROW:
                        raise HSpecError(
                            f"{self.server.url} gives no usable answers: {error} (prompt {prompt.id}). The answers so far are kept"
                        ) from error
                    continue
                bad = 0
                yield record

    def _said(self, prompt: Prompt, ids: list[int], settings: AnswerSettings) -> tuple[str, str] | _NoAnswerError:
        """What the server says to a prompt, and why it ended; or why that cannot be used."""
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "temperature": settings.temperature(prompt),
            "top_p": 1.0,
            "max_tokens": min(settings.max_tokens, self.target.max_positions - len(ids)),
            "seed": (settings.seed ^ int(prompt.id, 16)) % 2**31,
            "stream": False,
        }
        if self.template.options:
            body["chat_template_kwargs"] = self.template.options
        try:
            return _text_and_finish(_json(self._ask("POST", "chat/completions", body)))
        except _NoAnswerError as error:
            return error

    def _record(
        self, prompt: Prompt, ids: list[int], said: tuple[str, str] | _NoAnswerError, settings: AnswerSettings
    ) -> dict[str, Any]:
        if isinstance(said, _NoAnswerError):
            raise said
        text, finish = said
        tokens = self._tokens(text)
        return {
            "id": prompt.id,
            "messages": [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": text}],
            "finish": finish,
            "temperature": settings.temperature(prompt),
            "prompt_tokens": ids,
            "tokens": [*tokens, self._end] if finish == "stop" else tokens,
        }

    def _tokens(self, text: str) -> list[int]:
        tokenizer = self.template.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        if "\ufffd" in text or tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
            raise _NoAnswerError("the target's tokenizer does not give its text back")
        if self.target.eos_ids & set(ids):
            raise _NoAnswerError("it has an end of turn in the middle")
        return ids

    def _ask(self, method: str, page: str, body: dict[str, Any] | None = None) -> Response:
        where = self.server.page(page)
        try:
            reply = self._session.request(method, where, json=body, timeout=self.server.timeout, allow_redirects=False)
        except (RequestException, ValueError) as error:
            raise HSpecError(
                f"no reply from {where}, tried several times ({_cause(error)}): is the server there? The answers so far are kept"
            ) from error
        if reply.status_code in (*_REFUSED, *_TRY_AGAIN) or 300 <= reply.status_code < 400:
            why = _REFUSED.get(reply.status_code, "and so after every retry" if reply.status_code >= 400 else "a redirect")
            raise HSpecError(f"{where} answers {reply.status_code}, {why}: {_short(reply.text)}. The answers so far are kept")
        if not reply.ok:
            raise _NoAnswerError(f"it refuses the prompt ({reply.status_code}: {_short(reply.text)})")
        return reply


def _json(reply: Response) -> Any:
    try:
        return reply.json()
    except (ValueError, RecursionError) as error:
        raise _NoAnswerError(f"its reply is not JSON but {_short(reply.text)}") from error


def _text_and_finish(reply: Any) -> tuple[str, str]:
    """Text and reason of its end."""
    try:
        choice = reply["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        text, apart = message["content"], message.get("reasoning_content") or message.get("reasoning")
    except (LookupError, TypeError, AttributeError) as error:
        raise _NoAnswerError(f"its reply has no choices with a message but is {_short(reply)}") from error
    if apart:
        raise _NoAnswerError(
            "it tells its thoughts apart from its answer, so that what it wrote is not known: start it without a parser for them"
        )
    if not isinstance(text, str) or finish not in ("stop", "length"):
        raise _NoAnswerError(f"its reply has no text that ends with stop or length, but {_short(choice)}")
    if not text.strip():
        raise _NoAnswerError("its answer is empty")
    return text, finish


def _end_of_turn(template: ChatTemplate) -> int:
    """The token that ends an answer: the one that the template prints behind it."""
    exchange = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]
    try:
        ids, mask = template.encode_supervised(exchange)
    except HSpecError:  # it rewrites what was said, which does not matter to one answer
        return min(template.eos_ids)
    ends = [token for token, own in zip(ids, mask, strict=True) if own and token in template.eos_ids]
    return ends[-1] if ends else min(template.eos_ids)


def _in_parallel(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[tuple[Item, Result]]:
    """Items with their results as they come; what ``work`` raises is raised here, and nothing more is begun.

    The threads do not keep the program from ending: after Ctrl-C nobody waits for a server that thinks for minutes.
    """
    todo: SimpleQueue[Item] = SimpleQueue()
    done: SimpleQueue[tuple[Item, Result] | BaseException] = SimpleQueue()
    stop = threading.Event()
    for item in items:
        todo.put(item)

    def run() -> None:
        while not stop.is_set():
            try:
                item = todo.get_nowait()
            except Empty:
                return
            try:
                done.put((item, work(item)))
            except BaseException as error:
                done.put(error)

    for _ in range(min(workers, len(items))):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in items:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        stop.set()


def _short(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return repr(text if len(text) <= 200 else text[:200] + " ...")


def _cause(error: BaseException) -> str:
    """The innermost reason of a chain of wrappers."""
    inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
    return _cause(inner) if isinstance(inner, BaseException) else " ".join(str(error).split())
