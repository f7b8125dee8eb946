"""CloverLM: the flags vLLM needs for it, and the vocabulary file that its repository does not have.

Pure, but for `check_vocabulary`.
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

# of a vocabulary; the number of ids is a u24 at byte 14 (engine/plugin/tokenmonster/vocabulary.py)
HEADER_BYTES = 23


def cloverlm_flags(checkpoint: Checkpoint | None, args: Mapping[str, Choice]) -> Choices:
    """What a CloverLM model needs beyond `args`. Raises MODEL where nothing says which vocabulary
    its text is in, CONFIG for another quantization.
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
    asked = args.get("--quantization")
    if asked is not None and asked.value != QUARTET2:
        what = (
            f"--quantization {asked.value} cannot read {checkpoint.id}: its scales are in tiles of"
            " 128x4"
        )
        raise NibbleError(
            ExitCode.CONFIG, what=what, expected=QUARTET2, action="drop --quantization"
        )
    wanted = {
        "--quantization": Choice(
            QUARTET2, "nibble's default", "CloverLM was trained for Quartet II's NVFP4"
        ),
        "--tokenizer-mode": Choice(
            TOKENMONSTER, "nibble's default", "its vocabulary is TokenMonster's"
        ),
    }
    found = {name: choice for name, choice in wanted.items() if name not in args}
    mode = args.get("--tokenizer-mode", wanted["--tokenizer-mode"])
    if (
        mode.value == TOKENMONSTER
        and "--tokenizer" not in args
        and "--skip-tokenizer-init" not in args
    ):
        _check_named(checkpoint)
    return found


def _check_named(checkpoint: Checkpoint) -> None:
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
    """Read the vocabulary file that will be used. Raises MODEL for none, for a damaged one, and
    for that of another model.
    """
    if checkpoint is None or not is_cloverlm(checkpoint) or "--tokenizer-mode" not in args:
        return
    if args["--tokenizer-mode"].value != TOKENMONSTER:
        return
    named = args.get("--tokenizer")
    folder = Path(str(named.value)) if named else checkpoint.path
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
