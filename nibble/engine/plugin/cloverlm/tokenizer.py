"""--tokenizer-mode tokenmonster: a TokenMonster vocabulary file as vLLM's tokenizer (vllm 0.32
tokenizers/protocol.py).

Reads only local files. The tokenizer has no helper process and no state, so threads and forks may
share it. `<eot>` in a text becomes the token that ends a document, as in the authors' evaluations;
prompts get no prefix.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers import BatchEncoding
from transformers.utils import chat_template_utils
from vllm.tokenizers.protocol import TokenizerLike
from vllm.v1.structured_output.utils import OutlinesVocabulary

from nibble.engine.contract import VOCABULARY, VOCABULARY_SOURCE
from nibble.engine.plugin.tokenmonster import EOT, Vocabulary, eot_of, load

CHAT_TEMPLATE = "chat_template.jinja"


def find_vocabulary(path: Path) -> Path:
    """The vocabulary file: `path`, or the only one in the folder `path`.

    Raises FileNotFoundError.
    """
    if path.is_file():
        return path
    files = sorted(file for file in path.glob("*.vocab*") if file.is_file())
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files) or "none"
    raise FileNotFoundError(
        f"CloverLM's tokenizer needs one TokenMonster vocabulary file in {path} ({names} there):"
        f" put {VOCABULARY} from {VOCABULARY_SOURCE} into it, or give its path with --tokenizer"
    )


class TokenMonsterTokenizer(TokenizerLike):
    """vLLM's tokenizer. Token strings are the bytes of a token in Latin-1, so that tokens with a
    part of a character lose no bytes.
    """

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: Any,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        **kwargs: Any,
    ) -> TokenMonsterTokenizer:
        """The tokenizer of a folder with one .vocab file, or of the file. Downloads nothing.

        Raises ValueError or FileNotFoundError.
        """
        from nibble.engine.plugin.cloverlm.grammars import register_grammars

        register_grammars()  # not in the plugin, because other models do not need it
        file = find_vocabulary(Path(path_or_repo_id))
        vocabulary = load(file)
        template = file.parent / CHAT_TEMPLATE
        return cls(
            vocabulary,
            eot_of(vocabulary, file.name),
            name_or_path=str(path_or_repo_id),
            chat_template=template.read_text() if template.is_file() else None,
            truncation_side=kwargs.get("truncation_side", "left"),
        )

    def __init__(
        self,
        vocabulary: Vocabulary,
        eot: int,
        *,
        name_or_path: str = "",
        chat_template: str | None = None,
        truncation_side: str = "left",
    ) -> None:
        self.vocabulary = vocabulary
        self.eot = eot
        self.name_or_path = name_or_path
        self.chat_template = chat_template
        self._truncation_side = truncation_side

    def num_special_tokens_to_add(self) -> int:
        return 0

    @property
    def all_special_tokens(self) -> list[str]:
        return [EOT]

    @property
    def all_special_ids(self) -> list[int]:
        return [self.eot]

    @property
    def bos_token_id(self) -> int:
        return self.eot

    @property
    def eos_token_id(self) -> int:
        return self.eot

    @property
    def pad_token_id(self) -> int:
        return self.eot

    @property
    def is_fast(self) -> bool:
        return False

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.max_id + 1

    @property
    def max_token_id(self) -> int:
        return self.vocabulary.max_id

    @property
    def max_chars_per_token(self) -> int:
        return max(self.vocabulary.longest, len(EOT))

    @property
    def truncation_side(self) -> str:
        return self._truncation_side

    def __hash__(self) -> int:
        return hash(id(self))

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(
        self,
        text: str | list[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> BatchEncoding:
        if text_pair is not None:
            raise ValueError("CloverLM has no pairs of texts")
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(each, truncation, max_length) for each in texts]
        masks = [[1] * len(each) for each in ids]
        if isinstance(text, str):
            return BatchEncoding({"input_ids": ids[0], "attention_mask": masks[0]})
        return BatchEncoding({"input_ids": ids, "attention_mask": masks})

    def get_vocab(self) -> dict[str, int]:
        return {self._token(identity): identity for identity in sorted(self.vocabulary.text_of)}

    def get_added_vocab(self) -> dict[str, int]:
        return {}  # <eot> is in the vocabulary, and vLLM puts spaces around added tokens

    def encode(
        self,
        text: str,
        truncation: bool | None = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split(EOT)):
            ids += ([self.eot] if index else []) + self.vocabulary.encode(part)
        if truncation and max_length is not None and len(ids) > max_length:
            return (
                ids[len(ids) - max_length :]
                if self._truncation_side == "left"
                else ids[:max_length]
            )
        return ids

    def get_chat_template(
        self, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None
    ) -> str | None:
        """`chat_template`, or that of the model's folder. CloverLM is published without one."""
        return chat_template if chat_template is not None else self.chat_template

    def apply_chat_template(
        self,
        messages: Any = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        conversation = messages if messages is not None else kwargs.pop("conversation", None)
        template = self.get_chat_template(chat_template)
        if conversation is None or template is None:
            raise ValueError("this model has no chat template; give one with --chat-template")
        (prompt,), _ = chat_template_utils.render_jinja_template(
            [conversation], chat_template=template, tools=cast(Any, tools), **kwargs
        )
        return self.encode(prompt) if tokenize else prompt

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id or ids of token strings; that of `<eot>` for an unknown token."""
        vocabulary = self.get_vocab()
        if isinstance(tokens, str):
            return vocabulary.get(tokens, self.eot)
        return [vocabulary.get(token, self.eot) for token in tokens]

    def convert_ids_to_tokens(
        self, ids: Sequence[int], skip_special_tokens: bool = False
    ) -> list[str]:
        return [
            self._token(identity)
            for identity in ids
            if not (skip_special_tokens and identity == self.eot)
        ]

    def spellings(self) -> list[bytes]:
        """For each id, the bytes that it adds to a text. Empty for `<eot>`, and for tokens with a
        mark that deletes a space.
        """
        texts = [self.vocabulary.text_of.get(identity, b"") for identity in range(self.vocab_size)]
        return [
            b"" if identity == self.eot or self.vocabulary.unmark(text) != text else text
            for identity, text in enumerate(texts)
        ]

    @functools.cached_property
    def _outlines_vocabulary(self) -> OutlinesVocabulary:
        """The vocabulary for outlines. vLLM reads this attribute if it exists; its conversion
        expects GPT-2's encoding of bytes (vllm 0.32 structured_output/utils.py:394).
        """
        from outlines_core import Vocabulary

        ids: defaultdict[bytes, list[int]] = defaultdict(list)
        for identity, text in enumerate(self.spellings()):
            if text:
                ids[text].append(identity)
        return OutlinesVocabulary(Vocabulary(self.eot, ids))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        data = "".join(tokens).encode("latin-1")
        return self.vocabulary.unmark(data).decode(errors="replace")

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        listed = [ids] if isinstance(ids, int) else list(ids)
        return self.convert_tokens_to_string(
            self.convert_ids_to_tokens(listed, skip_special_tokens)
        )

    def _token(self, identity: int) -> str:
        if identity == self.eot:
            return EOT
        return self.vocabulary.text_of.get(identity, b"").decode("latin-1")
