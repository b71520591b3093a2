"""A fine-tuned target, to see what a drafter that was not retrained is worth on it.

All weights are trained on what the assistant says in conversations (any source that ``hspec train`` reads), if you like under another
chat template. The folder loads with ``--target FOLDER``. The loss on conversations that were held out is printed before and after, so
that there is no doubt that the target has changed; it is a mean over the assistant's tokens, in nats, under the template that is
trained with.

    python benchmarks/finetune_target.py --data code.jsonl --out targets/code
    python benchmarks/finetune_target.py --data instructions.jsonl --template benchmarks/templates/question_answer.jinja --out targets/qa
    hspec eval --target targets/qa -d hspec=DRAFTER -d ngram --out results

``finetune_data.py`` beside this file writes two such data files. Prompts that are measured on must not be among them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import get_cosine_schedule_with_warmup

from hspec.errors import HSpecError, UsageError
from hspec.targets.sources import load_reference
from hspec.targets.template import ChatTemplate
from hspec.training.documents import check_template, from_conversations
from hspec.training.examples import Batch, Example, ExampleStream, collate
from hspec.training.prompts import Prompt, prompt_id
from hspec.training.sources import SourceConfig, stream_sources


@dataclass(frozen=True)
class Settings:
    """Of one fine-tune; they are kept beside its weights."""

    target: str
    data: str
    template: str | None
    steps: int
    batch_tokens: int
    max_tokens: int
    learning_rate: float
    warmup: int
    precision: str
    seed: int
    held_out: int


def documents(settings: Settings, template: ChatTemplate) -> tuple[list[Example], list[Example]]:
    """For training, and held out: 3 % of the conversations, by the hash of their first user turn, as ``hspec train`` chooses them."""
    check_template(template, own_answers=False)
    parts: tuple[list[Example], list[Example]] = ([], [])
    sources = stream_sources([SourceConfig(source=settings.data)], lambda text: print(text, file=sys.stderr))
    for conversation, example in from_conversations(sources, template, settings.max_tokens):
        text = conversation.first_user_turn or ""
        parts[Prompt(prompt_id(text), text).held_out].append(example)
    if not all(parts):
        raise HSpecError(
            f"{settings.data}: {len(parts[0])} conversations to train on and {len(parts[1])} held out: give more, with answers"
        )
    return parts[0], parts[1][: settings.held_out]


def assistant_loss(model: Any, batch: Batch, bf16: bool) -> tuple[Tensor, int]:
    """The summed loss of the assistant's tokens, and how many they are. Padding is on the right, where nothing attends to it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=batch.tokens).logits
    wanted = batch.supervised[:, 1:]
    loss = F.cross_entropy(logits[:, :-1][wanted].float(), batch.tokens[:, 1:][wanted], reduction="sum")
    return loss, int(wanted.sum())


@torch.no_grad()
def held_out_loss(model: Any, examples: Sequence[Example], bf16: bool) -> float:
    """Mean over the assistant's tokens of all examples."""
    model.eval()
    found = [assistant_loss(model, collate([example]), bf16) for example in examples]
    return sum(float(loss) for loss, _ in found) / sum(count for _, count in found)


def fine_tune(model: Any, examples: Sequence[Example], settings: Settings) -> int:
    """AdamW over all weights, cosine schedule; returns how many of the assistant's tokens were seen."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimiser, settings.warmup, settings.steps)
    stream, seen, began = ExampleStream(examples, settings.batch_tokens, settings.seed), 0, time.perf_counter()
    model.train()
    for step in range(settings.steps):
        loss, count = assistant_loss(model, stream.batch(step), settings.precision == "bf16")
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        seen += count
        if (step + 1) % 10 == 0 or step == 0:
            spent = time.perf_counter() - began
            print(
                f"step {step + 1:,} of {settings.steps:,}: loss {loss.item() / count:.3f}, {spent:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return seen


def save(model: Any, tokenizer: Any, about: dict[str, Any], folder: Path) -> None:
    """Write the folder, whole or not at all."""
    temporary = folder.with_name(folder.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "finetune.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder)


def run(settings: Settings, out: Path) -> dict[str, Any]:
    """Fine-tune, save, and tell what came of it.

    Raises:
        UsageError: the folder is there already, or a file is not.
        HSpecError: the data or the template cannot be trained on.
    """
    if out.exists():
        raise UsageError(f"{out} is there already: choose another --out")
    torch.manual_seed(settings.seed)
    model, tokenizer = load_reference(settings.target)
    if settings.template is not None:
        if not Path(settings.template).is_file():
            raise UsageError(f"no template at {settings.template}: check the path given to --template")
        tokenizer.chat_template = Path(settings.template).read_text(encoding="utf-8")
    training, held_out = documents(settings, ChatTemplate(tokenizer))
    bf16 = settings.precision == "bf16"
    before = held_out_loss(model, held_out, bf16)
    print(f"held-out loss before: {before:.4f} ({len(held_out)} conversations)", file=sys.stderr, flush=True)
    tokens = fine_tune(model, training, settings)
    after = held_out_loss(model, held_out, bf16)
    print(f"held-out loss after: {after:.4f}", file=sys.stderr)
    about = {
        **asdict(settings),
        "conversations": len(training),
        "held_out": len(held_out),
        "assistant_tokens_seen": tokens,
        "held_out_loss_before": round(before, 4),
        "held_out_loss_after": round(after, 4),
    }
    save(model, tokenizer, about, out)
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="what to fine-tune, as in hspec's commands")
    parser.add_argument("--data", required=True, help="a file, or a data set, as 'hspec train --data' takes it")
    parser.add_argument("--template", help="a file with another chat template, which must only append")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=384, help="longer conversations are cut")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="bf16: products, by autocast")
    parser.add_argument("--held-out", type=int, default=32, help="conversations, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    given = vars(parser.parse_args())
    threads, out = given.pop("threads"), given.pop("out")
    if threads:
        torch.set_num_threads(threads)
    try:
        print(json.dumps(run(Settings(**given), out)))
    except HSpecError as error:
        sys.exit(f"finetune_target: {error}")


if __name__ == "__main__":
    main()
