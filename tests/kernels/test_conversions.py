"""E2M1 and E4M3 against the vectors, against each other on every 16-bit float, and against
CUDA's own header.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.kernels.kernel_cases import assert_same_bits, call, every_half, float_of, vectors

CUDA_HEADERS = Path("/usr/local/cuda/include")


def test_e2m1_vectors(implementation: str) -> None:
    """Ties to even, saturation, signed zeros, NaN to +6."""
    cases = vectors("e2m1_encode")["vectors"]
    x = torch.cat([float_of(case["f32_bits"]) for case in cases])
    pairs = torch.stack((x, torch.zeros_like(x)), dim=1)
    found = call(implementation, "conversions", _name("e2m1_encode", implementation), pairs).view(
        -1
    )
    assert_same_bits((found,), (torch.tensor([case["code"] for case in cases], dtype=torch.uint8),))


def test_e4m3_vectors(implementation: str) -> None:
    """Ties to even, saturation at 448 whatever torch's cast does, NaN to 0x7F."""
    cases = vectors("e4m3_encode")["vectors"]
    x = torch.cat([float_of(case["f32_bits"]) for case in cases])
    found = call(implementation, "conversions", _name("e4m3_encode", implementation), x).view(
        torch.uint8
    )
    assert_same_bits(
        (found,), (torch.tensor([case["code_satfinite"] for case in cases], dtype=torch.uint8),)
    )


def _name(function: str, implementation: str) -> str:
    """The reference has unpacked codes beside what the operators return."""
    suffix = {"e2m1": "_packed", "e4m3": "_float8"}[function.partition("_")[0]]
    return function + (suffix if implementation == "reference" else "")


def test_every_16_bit_float_and_its_neighbours_encode_as_specified(compiled: str) -> None:
    """All ties and limits of both formats are bfloat16 numbers; the floats next to each of those
    are tried too.
    """
    bits = torch.arange(65536, dtype=torch.int64) << 16
    neighbours = torch.cat([(bits + step).to(torch.int32) for step in (-1, 0, 1)]).view(
        torch.float32
    )
    for x in (every_half(torch.bfloat16), every_half(torch.float16), neighbours):
        for function in ("e2m1_encode", "e4m3_encode"):
            found = call(compiled, "conversions", function, x)
            expected = call("reference", "conversions", _name(function, "reference"), x)
            assert_same_bits((found,), (expected,), (function, x.dtype))


def test_every_byte_decodes_as_specified(compiled: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for function, x in (("e2m1_decode", codes), ("e4m3_decode", codes.view(torch.float8_e4m3fn))):
        found = call(compiled, "conversions", function, x)
        expected = call("reference", "conversions", _name(function, "reference"), x)
        nan = expected.isnan()
        assert torch.equal(found.isnan(), nan)
        assert_same_bits((found[~nan],), (expected[~nan],), function)


def test_leading_dimensions_are_kept(compiled: str) -> None:
    for rows in ((), (0,), (3,), (2, 1, 5)):
        x = torch.randn(*rows, 6)
        found = call(compiled, "conversions", "e2m1_encode", x)
        assert_same_bits(
            (found,), (call("reference", "conversions", "e2m1_encode_packed", x),), rows
        )
        assert found.shape == (*rows, 3)


HEADER_PROGRAM = """
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cstdint>
#include <cstdio>
#include <cstring>

int main() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint32_t wide = bits << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    std::putchar(__nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest));
    std::putchar(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
  }
}
"""


@pytest.mark.skipif(not (CUDA_HEADERS / "cuda_fp4.hpp").exists(), reason="no CUDA headers here")
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_every_bfloat16_encodes_as_in_cudas_own_header(kernels: object, tmp_path: Path) -> None:
    """An implementation that is not ours: what cuda_fp4.hpp and cuda_fp8.hpp compute on the
    host.
    """
    (tmp_path / "header.cpp").write_text(HEADER_PROGRAM)
    program = tmp_path / "header"
    subprocess.run(["g++", f"-I{CUDA_HEADERS}", "-o", program, tmp_path / "header.cpp"], check=True)
    told = subprocess.run([program], capture_output=True, check=True).stdout
    expected = torch.frombuffer(bytearray(told), dtype=torch.uint8).view(65536, 2)
    x = every_half(torch.bfloat16)
    e2m1 = call("reference", "conversions", "e2m1_encode", x)
    e4m3 = call("reference", "conversions", "e4m3_encode", x)
    assert_same_bits((e2m1, e4m3), (expected[:, 0], expected[:, 1]))


@pytest.mark.gpu
def test_the_gpus_instructions_agree_with_the_software_and_are_used(kernels: object) -> None:
    from nibble_kernels.conversions import conversion_report

    report = conversion_report("cuda")
    has_fp4 = torch.cuda.get_device_capability() >= (10, 0)
    assert report["e2m1"] == ("instruction" if has_fp4 else "software")
    assert report["e4m3"] == "instruction"
    assert (report["mismatches"], report["compared"]) == (0, 3 * 65536)


def test_no_gpu_is_reported_as_software(kernels: object) -> None:
    from nibble_kernels.conversions import conversion_report

    report = conversion_report("cpu")
    assert (report["e2m1"], report["e4m3"]) == ("software", "software")
