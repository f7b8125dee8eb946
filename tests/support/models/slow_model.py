"""Makes a slow model: random Qwen3, some tens of tokens/s on two cores, for tests that must catch
it streaming.

A model that answers in a blink proves nothing about draining: its stream is over before the signal
is handled. The tokenizer knows printable words only, so random output stays cheap to turn into
text.

    python -m tests.support.models.slow_model OUT [--layers 12] [--hidden 768]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.support.once import locked

VOCABULARY = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def make_slow_model(out: Path, layers: int = 12, hidden: int = 768) -> Path:
    """Write config, tokenizer and BF16 safetensors (about 14 * layers * hidden**2 bytes * 2) to
    `out`; returns it.

    Needs torch and transformers. An `out` that is already complete is left as it is.
    """
    done = out / "complete.json"
    recipe = {"layers": layers, "hidden": hidden, "format": 1}
    with locked(out):
        if not done.exists() or json.loads(done.read_text()) != recipe:
            _write(out, layers, hidden)
            done.write_text(json.dumps(recipe))
    return out


def _write(out: Path, layers: int, hidden: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(out)
    _tokenizer().save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)  # save_pretrained writes weights 0600, unreadable for a container's user


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", "<unknown>", *(f"word{number}" for number in range(VOCABULARY - 2))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, "<unknown>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("word", " word")])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<end>",
        eos_token="<end>",
        unk_token="<unknown>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    options = parser.parse_args()
    print(make_slow_model(options.out, options.layers, options.hidden))
