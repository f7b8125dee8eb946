"""Finds loads from shared memory that are on their way when a barrier in shared memory is told.

Such a load may be overtaken by the bulk copy that the arrival lets go (nibble/
warpgroup_instructions.cuh, `arrive`). Instructions of SM90 to SM121 keep in the upper half of their
second word which of six counters they raise, and for which they wait until zero. Loads from shared
memory return in order.
"""

from __future__ import annotations

import re
from typing import NamedTuple

INSTRUCTION = re.compile(
    r"/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*/\* (0x[0-9a-f]{16}) \*/"
)
COUNTERS = 6
ENDS_BLOCK = re.compile(r"\b(BRA|BRX|JMP|CALL|RET|EXIT|BSYNC|BREAK)\b")


class Instruction(NamedTuple):
    address: int
    text: str
    raises: int  # the counter that falls when the result is there; 7: none
    waits: int  # bits of counters

    @classmethod
    def of(cls, address: str, text: str, second_word: str) -> Instruction:
        control = int(second_word, 16) >> 41
        return cls(int(address, 16), text, control >> 5 & 7, control >> 11 & 63)


def loads_on_their_way(sass: str) -> list[str]:
    """Arrivals in the same block of instructions as loads that they do not wait for, in what
    `cuobjdump -sass` prints of one kernel.

    Kernels with products of a warpgroup are left out: there a stage is given back when the products
    of the next one have begun, and next to the loads of that one.
    """
    if "GMMA" in sass or "SYNCS.ARRIVE" not in sass:
        return []
    kernel = [Instruction.of(*found) for found in INSTRUCTION.findall(sass)]
    targets = {int(place, 16) for one in kernel for place in re.findall(r"0x[0-9a-f]+$", one.text)}
    found, loads = [], list[Instruction]()
    for one in kernel:
        if one.address in targets:
            loads = []
        for counter in range(COUNTERS):
            if one.waits >> counter & 1:
                done = max(
                    (i for i, load in enumerate(loads) if load.raises == counter), default=-1
                )
                loads = loads[done + 1 :]
        if "SYNCS.ARRIVE" in one.text and loads:
            found.append(f"{one.address:x} {one.text}: {loads[-1].address:x} {loads[-1].text}")
        if re.search(r"\bLDSM?\b", one.text):
            loads.append(one)
        if ENDS_BLOCK.search(one.text):
            loads = []
    return found
