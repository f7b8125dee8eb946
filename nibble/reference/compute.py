"""Computes a reference: `python -m nibble.reference.compute REQUEST`, without vLLM.

Prints progress to stdout as one JSON object per line. The last object has the key `done`, or
`problem` with the reason why the checkpoint has no reference.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.engine.contract.reference import norm_key
from nibble.errors import NibbleError
from nibble.reference.probe import Probe
from nibble.reference.prompts import NO_THINKING, PLAIN_TEXT, PROBE_TEXT, QUESTIONS, probe_tokens
from nibble.reference.store import Request, write_reference
from nibble.reference.streaming import StreamedModel
from nibble.reference.weights import Unsupported, Weights

NICE = 10
LAYER_FILE_BYTES = 256 << 20  # limit for the tensors of layers; the longer text is cut to fit
TOP_SAMPLE = 16  # tokens of the vocabulary whose log-probs are stored beside the most probable one
# transformers' modules raise these for checkpoints that they cannot compute.
MODULE_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Text:
    """A prompt (text or conversation; None for the longer text) and its tokens."""

    prompt: str | list[dict[str, str]] | None
    ids: tuple[int, ...]


def main() -> int:
    os.nice(NICE)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    request = Request.from_json(json.loads(sys.argv[1]))
    try:
        say(done=compute(request, lambda layer, of: say(layer=layer, of=of)))
    except Unsupported as why:
        say(problem=str(why))
    except NibbleError as error:
        say(problem=error.line())
    except MODULE_ERRORS as error:  # a start goes on without a reference
        if os.environ.get("NIBBLE_DEBUG", "") not in ("", "0"):
            raise
        first = (str(error).splitlines() or [""])[0]
        say(problem=f"transformers cannot compute it ({type(error).__name__}: {first[:200]})")
    return 0


def say(**message: Any) -> None:
    """Print one JSON object for nibble/reference/make.py."""
    print(json.dumps(message), flush=True)


def compute(request: Request, on_layer: Callable[[int, int], None]) -> dict[str, Any]:
    """Compute and write the reference. Returns its cost: seconds, tokens, layers, peak_bytes.

    on_layer: called with (layers done, layers). Raises Unsupported.
    """
    began = time.monotonic()
    checkpoint = read_checkpoint(request.model, path=Path(request.path))
    dtype = {"float32": torch.float32, "float64": torch.float64}[request.dtype]
    device = torch.device(request.device)
    texts = make_texts(checkpoint, request)
    with Weights(checkpoint, dtype, device, request.activations == "fp4") as weights:
        model = StreamedModel(checkpoint, weights, dtype, device, request.keeps)
        model.on_unit = _layers_done(model, on_layer)
        probe = Probe(model, texts[-1].ids, norm_weights(weights))
        ends = _ends(checkpoint, model)
        passes = [
            partial(answer, model, text.ids, request.answer_tokens, ends) for text in texts[:-1]
        ]
        *answers, _ = model.passes([*passes, probe.run])
    if not all(math.isfinite(value) for answered in answers for value in answered.logprobs):
        raise Unsupported("transformers' module computes NaN or infinity from this checkpoint")
    tokenizer = _tokenizer(checkpoint)
    cases = [
        {"prompt": text.prompt, "prompt_ids": list(text.ids), **answered.to_json(tokenizer)}
        for text, answered in zip(texts[:-1], answers, strict=True)
    ]
    about = {
        "norms": probe.norms(),
        "layers": len(model.layers),
        "template_is_dated": _is_dated(tokenizer),
    }
    write_reference(request, {**about, "cases": cases}, probe.tensors())
    tokens = sum(len(case["prompt_ids"]) + len(case["answer_ids"]) for case in cases)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "tokens": tokens,
        "layers": len(model.layers),
        "peak_bytes": _peak_bytes(),
    }


def _layers_done(
    model: StreamedModel, on_layer: Callable[[int, int], None]
) -> Callable[[str], None]:
    """A callback for StreamedModel.on_unit that reports decoder layers to `on_layer`."""
    places = {name: place for place, name in enumerate(model.layer_names)}

    def on_unit(unit: str) -> None:
        if unit in places:
            on_layer(places[unit] + 1, len(places))

    return on_unit


# --- texts ---


def _tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)


def _is_dated(tokenizer: Any) -> bool:
    """Whether the chat template puts the date into prompts: their tokens then change every day."""
    return any(word in str(tokenizer.chat_template) for word in ("strftime_now", "datetime"))


def make_texts(checkpoint: Checkpoint, request: Request) -> list[Text]:
    """The canary's prompts as tokens; the last is the longer text."""
    tokenizer = _tokenizer(checkpoint)
    texts = []
    for question in QUESTIONS if tokenizer.chat_template else ():
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **NO_THINKING
        )
        texts.append(Text(messages, tuple(ids)))
    plain = PLAIN_TEXT if tokenizer.chat_template else None
    texts += [
        Text(prompt, tuple(tokenizer(prompt).input_ids))
        for prompt in ([plain] if plain else [*QUESTIONS, PLAIN_TEXT])
    ]
    return [*texts, Text(None, _longer_text(checkpoint, tokenizer))]


def _longer_text(checkpoint: Checkpoint, tokenizer: Any) -> tuple[int, ...]:
    """Tokens of PROBE_TEXT, repeated or cut to a length that suits the model."""
    window = checkpoint.text_config.get("sliding_window")
    count = probe_tokens(window if isinstance(window, int) else None, checkpoint.max_model_len)
    bytes_per_token = 4 * (checkpoint.num_layers or 1) * (checkpoint.hidden_size or 1)
    count = max(16, min(count, LAYER_FILE_BYTES // bytes_per_token))
    ids: list[int] = []
    repeats = 1
    while len(ids) < count and repeats < 64:
        ids, repeats = tokenizer(PROBE_TEXT * repeats).input_ids, repeats * 2
    return tuple(ids[:count])


def _ends(checkpoint: Checkpoint, model: StreamedModel) -> set[int]:
    """The end-of-sequence tokens, which vLLM reads from generation_config.json and config.json."""
    ends: set[int] = set()
    path = Path(str(checkpoint.path)) / "generation_config.json"
    generation = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    for value in (generation, model.config.get_text_config().eos_token_id):
        if isinstance(value, list):
            ends |= set(value)
        elif isinstance(value, int):
            ends.add(value)
    return ends


# --- passes ---


@dataclass(frozen=True)
class Answered:
    """The greedy answer to a prompt. Log-probs are in nats.

    ids: tokens of the answer; logprobs: of all tokens of prompt and answer except the first;
    best_ids, best_logprobs: the most probable token at each of these positions; sample: log-probs
    of a fixed sample of the vocabulary after the prompt.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    best_ids: tuple[int, ...]
    best_logprobs: tuple[float, ...]
    sample: Mapping[int, float]

    def to_json(self, tokenizer: Any) -> dict[str, Any]:
        return {
            "answer": tokenizer.decode(self.ids, skip_special_tokens=True),
            "answer_ids": list(self.ids),
            "logprobs": [round(value, 4) for value in self.logprobs],
            "best_ids": list(self.best_ids),
            "best_logprobs": [round(value, 4) for value in self.best_logprobs],
            "vocabulary_sample": {
                str(token): round(value, 3) for token, value in self.sample.items()
            },
        }


def answer(model: StreamedModel, prompt: tuple[int, ...], tokens: int, ends: set[int]) -> Answered:
    """At most `tokens` greedy tokens after `prompt`; ends at a token of `ends`."""
    ids = torch.tensor([prompt], device=model.device)
    cached = tokens > 1
    out = model.module(input_ids=ids, use_cache=cached)
    rows = [out.logits[0].float().log_softmax(-1)]
    generated = [int(rows[0][-1].argmax())]
    while len(generated) < tokens and generated[-1] not in ends:
        step = torch.tensor([[generated[-1]]], device=model.device)
        out = model.module(input_ids=step, past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0].float().log_softmax(-1))
        generated.append(int(rows[-1][-1].argmax()))
    table = torch.cat(rows)  # log-probs [positions, vocabulary]
    every = torch.tensor([*prompt, *generated], device=model.device)
    logprobs = table[: len(every) - 1].gather(1, every[1:, None])[:, 0]
    best = table[: len(every) - 1].max(-1)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randint(0, table.shape[-1], (TOP_SAMPLE,), generator=generator)
    last = table[len(prompt) - 1]
    return Answered(
        tuple(generated),
        tuple(logprobs.tolist()),
        tuple(best.indices.tolist()),
        tuple(best.values.tolist()),
        {int(token): float(last[token]) for token in sample},
    )


def norm_weights(weights: Weights) -> dict[str, Tensor]:
    """The weights of norms as tensors of the reference: norm_key -> float32 [width].

    They are compared directly, because a server with two norms exchanged may compute nearly the
    same values.
    """
    names = [
        name
        for name in weights.names
        if name.endswith("norm.weight") and len(weights.shape(name)) == 1
    ]
    return {norm_key(name): weights.load(name).float().cpu() for name in names}


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
