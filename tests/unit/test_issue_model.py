"""The arithmetic of benchmarks/issue_model.py, and its reading of a self-test's report; the loops
themselves are in tests/kernels/test_fp4_instructions.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.issue_model import (
    GPUS,
    Gpu,
    Loop,
    instructions,
    margin,
    measured_gpu,
    print_measured,
)
from nibble.trials.report import Place, Report
from nibble.trials.trial import Outcome

PLACE = Place("gb10", "NVIDIA GB10", 1, "580.95", "13.0", "0" * 12, "1" * 12)
REPORT = Report(
    PLACE,
    "2026-11-25",
    60.0,
    (
        Outcome("bandwidth", "right", facts={"read_gb_per_s": 240.0}),
        Outcome("decode", "right", times={"4096x4096": {"1": 43.0}}),
    ),
    states=("GPU 0: P0, 2400 of 2500 MHz, 40 of 140 W, 50 C",),
)
BODY = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0030*/               @P0 BRA 0x10 ;
        /*0040*/               @P1 BRA 0x0 ;
"""


def test_the_shortest_loop_with_the_product_counts() -> None:
    assert instructions(BODY, "HMMA") == (3, 1)


def test_a_margin_is_cycles_of_the_bytes_over_cycles_of_the_loop() -> None:
    gpu = Gpu("one", multiprocessors=1, hertz=1e9, bytes_per_second=1e9, fp4_per_second=1e15)
    assert margin(Loop("", "", "", "OMMA", 100), gpu, count=50, products=0) == pytest.approx(8)
    # 16384 operations at 1e15 a second: 0.066 cycles of four schedulers each.
    slow = replace(gpu, fp4_per_second=4 * 16384 * 1e9 / 10)
    assert margin(Loop("", "", "", "OMMA", 100), slow, 50, 10) == pytest.approx(4)
    assert margin(Loop("", "", "", "OMMA", 100, 50), gpu, 50, 0) == pytest.approx(4)


def test_a_report_gives_the_gpus_own_clock_and_reads(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = measured_gpu(REPORT)
    assert gpu == replace(GPUS[0], hertz=2.5e9, bytes_per_second=240e9)
    print_measured(REPORT, gpu)
    assert "W4A16 4096x4096, 1 row: 219 GB/s, 91% of the reads" in capsys.readouterr().out


def test_another_gpu_is_refused_by_name() -> None:
    report = replace(REPORT, place=replace(PLACE, device="NVIDIA H200"))
    with pytest.raises(SystemExit, match="no model of NVIDIA H200; expected: one of GB10, RTX PRO"):
        measured_gpu(report)
