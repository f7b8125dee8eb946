"""Rows about several models on one port."""

from __future__ import annotations

from nibble.machine.memory import memory_now
from tests.support.bad_input.case import Case, Row, file, row, serve

ROOM_GIB = 2.6  # each of the demos takes 1.7


def room_for_one() -> str:
    """The share of this machine's memory that holds one demo and not two."""
    return f"{ROOM_GIB * 2**30 / memory_now().total_bytes:.4f}"


TWO = ("nibble-demo", "nibble-demo-nvfp4")


def _in_file(text: str) -> Case:
    return serve("--config", "{tmp}/several.toml", prepare=file("several.toml", text.encode()))


def several_rows() -> list[Row]:
    """Models that do not fit, names, and tables of the user's file."""
    return [
        row(
            "several-no-fit",
            "several models that do not fit together",
            7,
            "the models do not fit together: nibble-demo … GiB + nibble-demo-nvfp4 … GiB = … GiB"
            " needed with one sequence each; … may be used; set NIBBLE_LOADING=on-demand, which"
            " loads them by turns, or set a smaller MAX_MODEL_LEN or serve fewer models",
            serve(*TWO, GPU_MEMORY_UTIL=room_for_one()),
        ),
        row(
            "several-equal-names",
            "two models, or aliases, with one name",
            5,
            "two models have the name '…'; expected a name for each model; remove one, or give"
            " another alias",
            serve("nibble-demo", "nibble-demo"),
            serve("x=nibble-demo", "x=nibble-demo-nvfp4"),
            serve("nibble-demo-nvfp4=nibble-demo", "nibble-demo-nvfp4"),
        ),
        row(
            "several-sleep",
            "`NIBBLE_UNLOAD=sleep` on a CPU or with unified memory",
            5,
            "NIBBLE_UNLOAD is sleep, and nibble-demo cannot sleep: …; expected stop or auto on"
            " this machine; unset NIBBLE_UNLOAD",
            serve(*TWO, NIBBLE_UNLOAD="sleep"),
            serve(*TWO, "--unload", "sleep"),
        ),
        row(
            "several-served-name",
            "`NIBBLE_SERVED_MODEL_NAME` with several models",
            5,
            "one additional name is set for several models; expected a name for each; write"
            " ALIAS=MODEL, or aliases in [[models]]",
            serve(*TWO, "--served-model-name", "x"),
            serve(*TWO, NIBBLE_SERVED_MODEL_NAME="x"),
        ),
        row(
            "several-tls",
            "vLLM's TLS flags with several models",
            5,
            "vLLM's TLS flags with several models; expected one model, or TLS in a proxy; put a"
            " proxy with TLS before nibble",
            serve(*TWO, "--ssl-certfile", "/x"),
        ),
        row(
            "several-machines",
            "several models on several machines",
            5,
            "several models on several machines; …",
            serve(*TWO, "--nnodes", "2", HEAD_IP="127.0.0.1"),
        ),
        row(
            "several-table",
            "`[[models]]` that is not a list of tables, or lacks a model",
            5,
            "model… in …/several.toml is …; expected …; correct that line",
            _in_file("models = 3"),
            _in_file("[[models]]\nkeep = true"),
        ),
        row(
            "several-key",
            "an unknown key in `[[models]]`, or one for the whole server",
            5,
            "a [[models]] in …/several.toml has …; …",
            _in_file('[[models]]\nmodel = "nibble-demo"\nmax_num_seq = 4'),
            _in_file('[[models]]\nmodel = "nibble-demo"\nport = 9000'),
        ),
        row(
            "several-option",
            "an option of one model with a value that it cannot have",
            2,
            "nibble-demo: max_num_seqs in …/several.toml is '0'; expected …",
            _in_file('[[models]]\nmodel = "nibble-demo"\nmax_num_seqs = 0'),
        ),
    ]
