"""Compiles a request's structured outputs as the engine does. Runs in the worker's children.

It calls vLLM's code with the server's objects: the request model, the tool and reasoning parser,
the validation that chooses a backend, and the backend. So a grammar that compiles here also
compiles in the engine.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from dataclasses import dataclass, field
from typing import Any

from nibble.engine.guard.grammar_fields import ANTHROPIC, BATCH, COMPLETIONS, RESPONSES

LOOP_SECONDS = 0.1  # limit for parsing and validation, which the API process repeats on its loop
MASK_SECONDS = 0.1  # limit for filling one mask; the engine fills one per token
STEPS = 48  # tokens to try: enough to reach the costs of repetitions and nested rules
_STUB = "x"  # stands for the prompt
# vLLM refuses a request whose thinking.budget_tokens is not below its max_tokens.
_MOST_TOKENS = 2**31 - 1
_REASON_CHARS = 400
# xgrammar begins its errors with the time, a file and a line.
_COMPILER_PREFIX = re.compile(r"^\[[\d:]+\] \S+\.(?:cc|h):\d+: ")


class Refusal(Exception):
    """The structured output cannot be served. The text is for the client."""


class TooSlow(Refusal):
    """The structured output takes longer than a limit. A busy machine may be the cause."""


class OutOfMemory(Exception):
    """The compiler reached the limit of memory and reported it."""


class NeedsBackend(Exception):
    """The worker has to build the named backend before it forks, so that children share it."""


@dataclass
class Compiler:
    """The server's objects and the backends built so far, by name.

    first: the backend that the engine uses. vLLM 0.32 keeps the backend of its first structured
    request for all later ones (structured_output/__init__.py:154).
    """

    vllm_config: Any
    renderer: Any  # vllm.renderers.online_renderer.OnlineRenderer
    generation_config: dict[str, Any] = field(default_factory=dict)
    backends: dict[str, Any] = field(default_factory=dict)
    first: str | None = None

    @classmethod
    def of_app(cls, app: Any) -> Compiler:
        """From the state of vLLM's API server (vllm 0.32 launchers/api_server/app_state.py:63)."""
        config = app.state.vllm_config
        return cls(
            config, app.state.online_renderer, config.model_config.try_get_generation_config()
        )

    def build(self, name: str) -> None:
        """Build a backend as vLLM 0.32's StructuredOutputManager.grammar_init does."""
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend
        from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        classes = {
            "xgrammar": XgrammarBackend,
            "guidance": GuidanceBackend,
            "outlines": OutlinesBackend,
            "lm-format-enforcer": LMFormatEnforcerBackend,
        }
        self.backends[name] = classes[name](
            self.vllm_config,
            tokenizer=self.renderer.renderer.get_tokenizer(),
            vocab_size=self.vllm_config.model_config.get_vocab_size(),
        )

    def warm(self) -> None:
        """Build what a tokenizer builds at its first use: 0.7 s of CPU time for Mistral's Tekken
        (mistral.py:561).
        """
        with contextlib.suppress(Exception):
            _ = self.renderer.renderer.get_tokenizer().llg_tokenizer

    def check(self, path: str, fields: dict[str, Any]) -> tuple[str | None, float]:
        """Compile the grammar of a request. Fields are those of grammar_fields.grammar_fields.

        Returns the chosen backend, or None if vLLM compiles nothing, and the seconds that vLLM's
        event loop will take to read the grammar. Raises Refusal, TooSlow, OutOfMemory or
        NeedsBackend.
        """
        began = time.process_time()
        params = self._sampling_params(path, fields)
        if params.structured_outputs is not None:
            self._validate(params)
        if (spent := time.process_time() - began) > LOOP_SECONDS:
            raise TooSlow(f"It takes {spent:.2f} s to read; expected at most {LOOP_SECONDS} s.")
        if params.structured_outputs is None:
            return None, spent
        chosen = params.structured_outputs._backend
        for name in dict.fromkeys((self.first or chosen, chosen)):
            if name not in self.backends:
                raise NeedsBackend(name)
            self._compile(self.backends[name], params)
        return chosen, spent

    def _sampling_params(self, path: str, fields: dict[str, Any]) -> Any:
        if not isinstance(fields.get("structured_outputs", {}), dict):
            raise Refusal("structured_outputs: expected an object.")
        try:
            request = self._adjusted(path, build_request(path, fields))
            params = request.to_sampling_params(16, {})
            eos = self.renderer.renderer.get_eos_token_id()
            params.update_from_generation_config(self.generation_config, eos)
            return params
        except Exception as error:
            raise refusal_of(error) from None

    def _adjusted(self, path: str, request: Any) -> Any:
        """The request with the grammar that the server's parser makes of tools (vllm 0.32
        renderers/online_renderer.py:815).
        """
        renderer = self.renderer
        if path == COMPLETIONS:
            return request
        if renderer.use_harmony:
            renderer.adjust_harmony_request(request)
            return request
        if renderer.parser is None:
            return request
        params = request.build_chat_params(
            renderer.chat_template, renderer.chat_template_content_format
        ).with_defaults(renderer.default_chat_template_kwargs)
        parser = renderer.parser(
            renderer.renderer.get_tokenizer(),
            request.tools,
            model_config=self.vllm_config.model_config,
            chat_template_kwargs=params.chat_template_kwargs,
        )
        return parser.adjust_request(request=request)

    def _validate(self, params: Any) -> None:
        try:
            params._validate_structured_outputs(
                self.vllm_config.model_config,
                self.vllm_config.structured_outputs_config,
                self.renderer.renderer.get_tokenizer(),
            )
        except Exception as error:
            raise refusal_of(error) from None

    def _compile(self, backend: Any, params: Any) -> None:
        from vllm.v1.structured_output.request import get_structured_output_key

        try:
            kind, text = get_structured_output_key(params.structured_outputs)
            grammar = backend.compile_grammar(kind, text, stop_token_ids=params.all_stop_token_ids)
            mask = backend.allocate_token_bitmask(1)
        except Exception as error:
            raise refusal_of(error) from None
        walk(grammar, mask)


def build_request(path: str, fields: dict[str, Any]) -> Any:
    """vLLM's request object for the route `path`, with one word as its prompt."""
    message = {"role": "user", "content": _STUB}
    if path == COMPLETIONS:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return CompletionRequest.model_validate({"prompt": _STUB, **fields})
    if path == RESPONSES:
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        return ResponsesRequest.model_validate({"input": _STUB, **fields})
    if path in ANTHROPIC:
        return _from_anthropic({**fields, "messages": [message, *fields.get("messages", ())]})
    from vllm.entrypoints.openai.chat_completion import protocol

    if path == BATCH:
        batch = protocol.BatchChatCompletionRequest.model_validate(
            {"messages": [[message]], **fields}
        )
        return batch.to_chat_completion_request([message])  # type: ignore[list-item]
    return protocol.ChatCompletionRequest.model_validate({"messages": [message], **fields})


def _from_anthropic(body: dict[str, Any]) -> Any:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    stub = {"model": _STUB, "max_tokens": _MOST_TOKENS}
    request = AnthropicMessagesRequest.model_validate({**stub, **body})
    return AnthropicServingMessages.to_chat_completion_request(request)


def walk(grammar: Any, mask: Any) -> None:
    """Follow the grammar for STEPS random tokens. Raises Refusal or TooSlow.

    Each mask has to allow a token and to be filled within MASK_SECONDS, because the engine fills
    the masks of all running requests between two steps of the model.
    """
    chance = random.Random(0)
    for step in range(STEPS):
        if grammar.is_terminated():
            return
        began = time.thread_time()
        grammar.fill_bitmask(mask, 0)
        if (spent := time.thread_time() - began) > MASK_SECONDS:
            raise TooSlow(
                f"Its mask for token {step + 1} takes {spent:.2f} s; expected at most"
                f" {MASK_SECONDS} s."
            )
        token = some_token(mask[0].tolist(), chance)
        if token is None:
            raise Refusal(
                "It allows no token" + (" at all." if step == 0 else f" after the first {step}.")
            )
        began = time.thread_time()
        accepted = grammar.accept_tokens("check", [token])
        if (spent := time.thread_time() - began) > MASK_SECONDS:
            raise TooSlow(
                f"Token {step + 1} takes {spent:.2f} s; expected at most {MASK_SECONDS} s."
            )
        if not accepted:
            return


def some_token(words: list[int], chance: random.Random) -> int | None:
    """A random token that a mask allows, or None. `words`: the mask, 32 bits each."""
    nonzero = [index for index, word in enumerate(words) if word]
    if not nonzero:
        return None
    index = chance.choice(nonzero)
    return 32 * index + chance.choice([bit for bit in range(32) if words[index] >> bit & 1])


def refusal_of(error: Exception) -> Exception:
    """The exception to raise for an error of vLLM or of a compiler."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return OutOfMemory()
    return Refusal(reason_of(error))


def reason_of(error: Exception) -> str:
    """The reason of an error in one line, without the client's input and without a traceback."""
    from pydantic import ValidationError

    if isinstance(error, RecursionError):
        return "It nests or refers to itself too deeply."
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        # pydantic adds the names of its wrappers, such as "function-wrap[...]".
        names = [str(part) for part in first["loc"] if "[" not in str(part)]
        text = ": ".join(filter(None, (".".join(names[:5]), first["msg"]))) + "."
    else:
        text = _COMPILER_PREFIX.sub("", str(error).partition("\n")[0]).partition(": {'json':")[0]
        if isinstance(error, AttributeError | TypeError | KeyError | AssertionError) or not text:
            text = f"Its shape is wrong ({type(error).__name__}: {text})."
    return text if len(text) <= _REASON_CHARS else text[:_REASON_CHARS] + "…"
