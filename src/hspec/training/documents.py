"""From conversations and answers to documents: which tokens are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hspec.errors import HSpecError
from hspec.files import reason
from hspec.targets.template import ChatTemplate
from hspec.training.conversations import Conversation
from hspec.training.corpus import Corpus, Example

_PROBE = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]


def check_template(template: ChatTemplate, own_answers: bool) -> None:
    """Try the template on one plain exchange: one that cannot do that can do nothing.

    Args:
        own_answers: the target answers, so that its tokens are known; otherwise they must be told apart in the text.

    Raises:
        UsageError: the tokenizer has no chat template.
        HSpecError: the user's words do not reach the target, or what the assistant wrote is not some of the tokens, but none or all.
    """
    if _PROBE[0]["content"] not in template.text(_PROBE[:1]):
        raise HSpecError(
            "the chat template leaves out what the user says: give the target's tokenizer a template that passes it on"
        )
    if own_answers:
        return
    try:
        _, mask = template.encode_supervised(_PROBE)
    except NotImplementedError as error:  # what transformers' slow tokenizers say
        raise HSpecError(
            "the tokenizer does not say where its tokens lie in the text, so the assistant's cannot be told apart: let the target answer "
            "(--own-answers), or give it a fast tokenizer (tokenizer.json)"
        ) from error
    if not any(mask) or all(mask):
        what = "every token" if mask and all(mask) else "no token"
        raise HSpecError(
            f"by the chat template {what} of a plain exchange is the assistant's, so there is no telling what to train on: let the target "
            f"answer (--own-answers), or give its tokenizer a template that shows both turns"
        )


def from_conversations(
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    max_tokens: int,
    on_refused: Callable[[Conversation, HSpecError], None] = lambda *_: None,
) -> Iterator[tuple[Conversation, Example]]:
    """Whole conversations, each with its document, which is cut to ``max_tokens``; those without a supervised token are left out.

    ``on_refused`` is told of each that the template does not take (roles that do not alternate, say). The template must have passed
    :func:`check_template`.
    """
    for conversation in conversations:
        if not conversation.has_answer:
            continue
        try:
            tokens, mask = template.encode_supervised(list(conversation.messages))
        except HSpecError as error:
            on_refused(conversation, error)
            continue
        tokens, mask = tokens[:max_tokens], mask[:max_tokens]
        if any(mask):
            yield conversation, Example(conversation.id, tokens, mask)


def from_answers(
    path: Path, max_tokens: int, sources: Mapping[str, int] | None = None, weights: Sequence[float] | None = None
) -> Corpus:
    """The target's own answers (see :mod:`hspec.training.answers`), with exactly the tokens that it drew.

    Args:
        sources: by the id of each answer that is wanted, the number of its source; None takes all.
        weights: see :class:`Corpus`.

    Raises:
        HSpecError: the file cannot be read, or is damaged.
    """
    corpus, damaged = Corpus(weights), ""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if damaged:  # and not the last line, which may be being written
                    raise HSpecError(damaged)
                try:
                    example = _answer(json.loads(line), max_tokens)
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    damaged = f"{path}, line {number}: not an answer record ({error!r}): remove that line"
                    continue
                if (sources is None or example.id in sources) and any(example.supervised):
                    corpus.append(example, sources[example.id] if sources else 0)
    except (OSError, UnicodeDecodeError) as error:
        raise HSpecError(f"cannot read the answers in {path}: {reason(error)}") from error
    return corpus


def _answer(record: dict[str, object], max_tokens: int) -> Example:
    prompt, answer = record["prompt_tokens"], record["tokens"]
    if not isinstance(prompt, list) or not isinstance(answer, list):
        raise TypeError("prompt_tokens and tokens must be lists")
    tokens = (prompt + answer)[:max_tokens]
    mask = ([False] * len(prompt) + [True] * len(answer))[:max_tokens]
    return Example(str(record["id"]), tokens, mask)
