"""Rows about models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.bad_input.case import Case, Place, Row, env, row, serve, serve_as_another_user
from tests.support.models.generated_hybrid import HybridShape
from tests.support.models.generated_nvfp4 import write_checkpoint
from tests.support.models.tiny_model import (
    QWEN3,
    write_header,
    write_model,
    write_safetensors,
)
from tests.support.servers.hub import OTHER_TOKEN


def broken(
    change: Callable[[Path], Any], config: Mapping[str, Any] | None = None
) -> Callable[[Place], Any]:
    """Write a model to {tmp}/broken and change it."""
    return lambda place: change(write_model(place.tmp / "broken", config))


def _in_a_closed_folder(place: Place) -> None:
    write_model(place.tmp / "closed/broken").parent.chmod(0o700)


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)


def _index_with_missing_shard(folder: Path) -> None:
    index = {
        "metadata": {},
        "weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _copy(folder: Path) -> None:
    write_safetensors(folder / "other.safetensors", {"model.norm.weight": ("BF16", [64])})


def _hybrid(place: Place) -> None:
    """A model of the Qwen3-Next family."""
    write_checkpoint(place.tmp / "broken", HybridShape(layers=4, experts=4), "bf16")


def _gigantic(folder: Path) -> None:
    """A terabyte of weights in a sparse file."""
    header = write_header({"model.embed_tokens.weight": ("BF16", [1 << 20, 1 << 19])})
    (folder / "model.safetensors").write_bytes(header)
    os.truncate(folder / "model.safetensors", len(header) + (1 << 40))


def keep(folder: Path) -> None:
    pass


BROKEN = "{tmp}/broken"


# Of a family whose shapes are not compared
THREE_KV_HEADS = QWEN3 | {
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "hidden_size": 192,
    "model_type": "afmoe",
}


def model_rows() -> list[Row]:
    """Models that are not there, not whole or not for this machine."""
    return [
        row(
            "no-model",
            "no model, on one of several machines",
            2,
            "the command has no model; …",
            env(("serve",), NIBBLE_NODE_RANK="1"),
            env(("plan",), HEAD_IP="10.0.0.1"),
        ),
        row(
            "two-variables",
            "`MODEL` and `HF_MODEL` differ",
            5,
            "MODEL='a/b' and HF_MODEL='c/d' differ; …",
            env(("serve",), MODEL="a/b", HF_MODEL="c/d"),
        ),
        row(
            "model-twice",
            "an argument and `MODEL` (or `HF_MODEL`) differ",
            5,
            "the command line has the model 'a/b' and the environment has 'c/d'; …",
            serve("a/b", MODEL="c/d"),
            serve("a/b", HF_MODEL="c/d"),
        ),
        row(
            "no-such-folder",
            "a folder that does not exist",
            4,
            "…/absent is not a folder; …",
            serve("{tmp}/absent"),
        ),
        row(
            "neither-folder-nor-id",
            "a model that is neither a folder nor an id",
            4,
            "'a/b/c' is neither a folder nor a Hugging Face id; …",
            serve("a/b/c"),
        ),
        row(
            "unknown-model",
            "an id the Hub does not have",
            4,
            "… has no public model acme/nope; …check the spelling; a private model needs HF_TOKEN",
            serve("acme/nope"),
            Case(("pull", "acme/nope")),
        ),
        row(
            "unknown-revision",
            "a revision the model does not have",
            4,
            "acme/tiny does not have the revision 'v9'; …",
            serve("acme/tiny", "--revision", "v9"),
        ),
        row(
            "gated-without-token",
            "a gated model without token",
            4,
            "acme/gated is a gated model and HF_TOKEN is not set; accept its terms at …/acme/gated,"
            " then give a token in HF_TOKEN or HF_TOKEN_FILE",
            serve("acme/gated"),
            Case(("pull", "acme/gated")),
        ),
        row(
            "gated-without-access",
            "a gated model with a token that has no access",
            4,
            "acme/gated is a gated model and the account of this HF_TOKEN has no access to it; "
            "request access at …",
            serve("acme/gated", HF_TOKEN=OTHER_TOKEN),
        ),
        row(
            "refused-token",
            "a token the Hub refuses",
            4,
            "… refuses this HF_TOKEN (invalid or expired); …",
            serve("acme/tiny", HF_TOKEN="hf_expired"),
        ),
        row(
            "endpoint",
            "`HF_ENDPOINT` that is not an address",
            2,
            "HF_ENDPOINT is not an address; expected an address such as https://huggingface.co;"
            " correct"
            " or unset HF_ENDPOINT",
            serve("acme/tiny", HF_ENDPOINT="http://hub:port"),
            serve("acme/tiny", HF_ENDPOINT="huggingface.co"),
        ),
        row(
            "unusable-token",
            "a token that no request can carry",
            2,
            "HF_TOKEN is not usable; expected one token, of visible ASCII characters; correct or"
            " unset HF_TOKEN",
            serve("acme/tiny", HF_TOKEN="hf_one\nhf_two"),
            serve("acme/tiny", HF_TOKEN="hf_é"),
        ),
        row(
            "offline",
            "`HF_HUB_OFFLINE=1` and the model is not cached",
            4,
            "acme/tiny is not complete in … and HF_HUB_OFFLINE is set; …",
            serve("acme/tiny", HF_HUB_OFFLINE="1"),
        ),
        row(
            "hub-unreachable",
            "the Hub does not answer and the model is not cached",
            4,
            "acme/tiny is not complete in … and http://127.0.0.1:9 cannot be used (…); …",
            serve("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9"),
        ),
        row(
            "corrupt-download",
            "a file whose sha256 differs from the Hub's after download",
            4,
            "downloaded files of acme/corrupt are corrupt: model.safetensors (sha256 … instead of"
            " …); run it again to fetch them again: nibble removed them from the cache",
            Case(("pull", "acme/corrupt")),
            serve("acme/corrupt"),
        ),
        row(
            "disk",
            "a download larger than the disk",
            7,
            "the download of acme/huge needs … and a margin of 1.0 GiB; … has … free, … too"
            " little; …",
            serve("acme/huge"),
            Case(("pull", "acme/huge")),
        ),
        row(
            "corrupt-safetensors",
            "a safetensors file with a broken header",
            4,
            "…/model.safetensors is corrupt: its header length is … bytes; …",
            serve(
                BROKEN,
                prepare=broken(
                    lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 500)
                ),
            ),
        ),
        row(
            "truncated-safetensors",
            "a truncated safetensors file",
            4,
            "…/model.safetensors is corrupt: it is truncated: … bytes of tensors; expected …"
            " bytes; …",
            serve(BROKEN, prepare=broken(_cut)),
        ),
        row(
            "empty-safetensors",
            "a safetensors file without tensors",
            4,
            "the safetensors files of … hold no tensors; expected the weights of a model; download"
            " the model again",
            serve(
                BROKEN,
                prepare=broken(
                    lambda folder: (folder / "model.safetensors").write_bytes(
                        (2).to_bytes(8, "little") + b"{}"
                    )
                ),
            ),
        ),
        row(
            "missing-shard",
            "a shard that the index names is missing",
            4,
            "…/model.safetensors.index.json names model-00002.safetensors, which is not there; …",
            serve(BROKEN, prepare=broken(_index_with_missing_shard)),
        ),
        row(
            "copies",
            "a tensor that two files hold with different values",
            4,
            "model.norm.weight is in …/model.safetensors and in other.safetensors, with different"
            " values; …",
            serve(BROKEN, prepare=broken(_copy)),
        ),
        row(
            "no-tokenizer",
            "a model's folder without a vocabulary",
            4,
            "…/broken has no tokenizer; expected tokenizer.json, tokenizer.model, vocab.json or"
            " another vocabulary; …",
            serve(BROKEN, prepare=broken(lambda folder: (folder / "tokenizer.json").unlink())),
        ),
        row(
            "no-config",
            "config.json missing",
            4,
            "…/config.json is missing; …",
            serve(BROKEN, prepare=broken(lambda folder: (folder / "config.json").unlink())),
        ),
        row(
            "config-not-json",
            "config.json is not JSON",
            4,
            "…/config.json is not JSON; …",
            serve(
                BROKEN, prepare=broken(lambda folder: (folder / "config.json").write_text('{"a": '))
            ),
            serve(
                BROKEN,
                prepare=broken(
                    lambda folder: (folder / "config.json").write_text('{"a":' * 100_000)
                ),
            ),
        ),
        row(
            "config-value",
            "config.json has a value of another kind than models have there",
            4,
            "config.json or hf_quant_config.json of …/broken has a value that cannot be read"
            " (…); …",
            serve(
                BROKEN,
                prepare=broken(
                    lambda folder: (folder / "config.json").write_text('{"architectures": 5}')
                ),
            ),
        ),
        row(
            "unreadable-file",
            "a model file that this user may not read",
            4,
            "uid 2000 cannot read …/broken/model.safetensors; "
            "run `chmod a+rX …/broken/model.safetensors` as its owner, or use `--user` of the"
            " owner",
            serve_as_another_user(
                BROKEN, prepare=broken(lambda folder: (folder / "model.safetensors").chmod(0o600))
            ),
        ),
        row(
            "closed-folder",
            "a model in a folder that this user may not enter",
            4,
            "uid 2000 cannot read …/closed; run `chmod a+x …/closed` as its owner, or use"
            " `--user` of the owner",
            serve_as_another_user("{tmp}/closed/broken", prepare=_in_a_closed_folder),
        ),
        row(
            "memory",
            "weights larger than the memory",
            7,
            "… does not fit: weights … + 1 sequence of … tokens at … + workspace … + engine … +"
            " reserve … = … needed; … available of … (…): … too little; try, in this order: …",
            serve(BROKEN, prepare=broken(_gigantic)),
        ),
        row(
            "state-blocks",
            "more `MAX_NUM_SEQS` than the KV cache has blocks for states (Mamba, gated delta net)",
            7,
            "MAX_NUM_SEQS is 64: vLLM starts only with a block of the KV cache for each sequence's"
            " states, and there are … blocks of … MiB; expected at most …; lower MAX_NUM_SEQS or"
            " --max-num-seqs",
            serve(
                BROKEN,
                *("--target", "hopper"),
                prepare=_hybrid,
                MAX_NUM_SEQS="64",
                NIBBLE_KV_CACHE_BYTES=str(32 << 20),
            ),
        ),
        row(
            "cloverlm",
            "a CloverLM checkpoint without its vocabulary file",
            4,
            "… needs one TokenMonster vocabulary file and has none; expected"
            " englishcode-32000-strict-nocapcode-v1-eot=14199.vocab; download it from"
            " https://huggingface.co/gvlassis/tokenmonster and name it with --tokenizer PATH, or"
            " put it into the model's folder",
            serve(
                BROKEN,
                prepare=broken(
                    keep,
                    QWEN3 | {"model_type": "cloverlm", "architectures": ["CloverLMForCausalLM"]},
                ),
            ),
        ),
        row(
            "cloverlm-vocabulary",
            "a CloverLM checkpoint with another file for its vocabulary",
            4,
            "…/broken/other.vocab is not a TokenMonster vocabulary of 128 ids; expected"
            " englishcode-32000-strict-nocapcode-v1-eot=14199.vocab; name the correct file with"
            " --tokenizer PATH",
            serve(
                BROKEN,
                prepare=broken(
                    lambda folder: (folder / "other.vocab").write_text(
                        "words, words, words and words"
                    ),
                    QWEN3 | {"model_type": "cloverlm", "architectures": ["CloverLMForCausalLM"]},
                ),
            ),
        ),
    ]
