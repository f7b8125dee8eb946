"""CloverLM: the flags that vLLM needs, and the check of its separate vocabulary file.

Pure, except `check_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.cloverlm import is_cloverlm
from nibble.engine.contract import (
    CLOVERLM_ARCHITECTURE,
    CLOVERLM_MODEL_TYPE,
    QUARTET2,
    TOKENMONSTER,
    VOCABULARY,
    VOCABULARY_SOURCE,
)
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import Choice, Choices

# Of a vocabulary file. The number of ids is a u24 at byte 14
# (engine/plugin/tokenmonster/vocabulary.py).
HEADER_BYTES = 23


def cloverlm_flags(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """The flags that a CloverLM model needs in addition to `args`. Raises MODEL if no vocabulary is
    known, CONFIG for another quantization.
    """
    if checkpoint is None or not is_cloverlm(checkpoint):
        return {}
    if checkpoint.architecture != CLOVERLM_ARCHITECTURE:
        what = (
            f"config.json of {checkpoint.where} has model_type {CLOVERLM_MODEL_TYPE} and the"
            f" architecture {checkpoint.architecture}"
        )
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected=CLOVERLM_ARCHITECTURE,
            action="restore the published config.json",
        )
    quantization = args.get("--quantization")
    if quantization is not None and quantization.value != QUARTET2:
        what = (
            f"--quantization {quantization.value} cannot read {checkpoint.id}: its scales are in"
            " tiles of 128x4"
        )
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected=QUARTET2, action="drop --quantization"
        )
    defaults = {
        "--quantization": Choice(
            QUARTET2, "nibble's default", "CloverLM was trained for Quartet II's NVFP4"
        ),
        "--tokenizer-mode": Choice(
            TOKENMONSTER, "nibble's default", "its vocabulary is TokenMonster's"
        ),
    }
    flags = {name: choice for name, choice in defaults.items() if name not in args}
    mode = args.get("--tokenizer-mode", defaults["--tokenizer-mode"])
    if (
        mode.value == TOKENMONSTER
        and "--tokenizer" not in args
        and "--skip-tokenizer-init" not in args
    ):
        _check_one_vocabulary(checkpoint)
    return flags


def _check_one_vocabulary(checkpoint: Checkpoint) -> None:
    names = sorted(name for name in checkpoint.files if "/" not in name and ".vocab" in name)
    if len(names) != 1:
        have = ", ".join(names) or "none"
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{checkpoint.where} needs one TokenMonster vocabulary file and has {have}",
            expected=VOCABULARY,
            action=f"download it from {VOCABULARY_SOURCE} and name it with --tokenizer PATH, or put"
            " it into the model's folder",
        )


def check_vocabulary(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> None:
    """Read the vocabulary file. Raises MODEL if it is absent, damaged or that of another model."""
    if checkpoint is None or not is_cloverlm(checkpoint) or "--tokenizer-mode" not in args:
        return
    if args["--tokenizer-mode"].value != TOKENMONSTER:
        return
    tokenizer = args.get("--tokenizer")
    folder = Path(str(tokenizer.value)) if tokenizer else checkpoint.path
    if folder is None:
        return
    file = next(iter(sorted(folder.glob("*.vocab*"))), folder) if folder.is_dir() else folder
    try:
        with file.open("rb") as stream:
            head = stream.read(HEADER_BYTES)
    except OSError as error:
        what = f"the vocabulary file {file} cannot be read: {error.strerror}"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected=VOCABULARY,
            action=f"download it from {VOCABULARY_SOURCE}",
        ) from None
    ids = int.from_bytes(head[14:17], "little")
    if len(head) < HEADER_BYTES or head[0] > 2 or head[1] > 2 or ids != checkpoint.vocab_size:
        what = f"{file} is not a TokenMonster vocabulary of {checkpoint.vocab_size} ids"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected=VOCABULARY,
            action="name the correct file with --tokenizer PATH",
        )
    _check_whole(file)


def _check_whole(file: Path) -> None:
    from nibble.engine.plugin.tokenmonster import eot_of, load

    try:
        eot_of(load(file), file.name)
    except ValueError as error:
        action = (
            f"download it again from {VOCABULARY_SOURCE}, or name the correct file with"
            " --tokenizer PATH"
        )
        raise NibbleError(
            ExitCode.MODEL, what=str(error), expected=VOCABULARY, action=action
        ) from None
