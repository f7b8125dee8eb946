"""Checks that the built or installed vLLM has GPU code for its target, at image build.

    python -m nibble.engine.gpu_code ROOT TARGET     # one line a module; exit 6 and one line where
    it does not

It needs pyelftools alone, which comes with the lock that vLLM is installed from.

What is told from the headers of the fat binaries (nibble.engine.fatbin): which source file has code
for which architecture, and so whether a GPU can load it. That the code is right, or has an
instruction in it, is not told: the code is compressed, and
tests/patches/test_compile_from_source.py disassembles what the same sources and flags give. A
module without a symbol table shows no names; then some code for the target's family must be there,
which a build that lost half of its objects may pass.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from nibble.engine.fatbin import Code, GpuObject, gpu_objects, needed_libraries
from nibble.engine.patching.tree import Tree, open_tree
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import Target, load_target

CORE, MOE = "_C_stable_libtorch", "_moe_C_stable_libtorch"
# with 12.x vLLM builds 12.0a for 12.0 (vllm 0.32 CMakeLists.txt:823, 997), which 12.1 cannot load
OLDEST_CUDA = 13

# Source files of vLLM's FP4, FP8 and Marlin FP4 kernels: their instructions exist for the a and f
# targets only, or vLLM builds them so (vllm 0.32 CMakeLists.txt: 618 Marlin, 790-870 scaled_mm,
# 995-1050 FP4, 1318 Marlin MoE).
FP4 = (
    "nvfp4_quant_kernels", "activation_nvfp4_quant_fusion_kernels", "nvfp4_experts_quant",
    "nvfp4_blockwise_moe_kernel", "nvfp4_kv_cache_kernels",
)  # fmt: skip
MARLIN_FP4 = ("sm80_kernel_bfloat16_fe2m1f_bfloat16", "sm80_kernel_float16_fe2m1f_float16")
FAMILY_CODE: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    12: {
        CORE: (
            *FP4,
            "nvfp4_scaled_mm_sm120_kernels",
            "scaled_mm_c3x_sm120",
            "scaled_mm_sm120_fp8",
            "scaled_mm_blockwise_sm120_fp8",
            *MARLIN_FP4,
        ),
        MOE: MARLIN_FP4,
    },
    10: {
        CORE: (
            *FP4,
            "nvfp4_scaled_mm_kernels",
            "scaled_mm_c3x_sm100",
            "scaled_mm_sm100_fp8",
            "scaled_mm_blockwise_sm100_fp8",
        ),
    },
    9: {CORE: ("scaled_mm_c3x_sm90", "scaled_mm_sm90_fp8", "scaled_mm_blockwise_sm90_fp8")},
}


def check_binaries(tree: Tree, target: Target) -> None:
    """Raise NibbleError (exit 6) naming the first module without usable code for a GPU of `target`,
    and why.
    """
    if target.device != "cuda":
        return
    paths = compiled_modules(tree)
    for path in paths:
        _check_cuda(tree, path, target)
    for module in (CORE, MOE):
        path = next((path for path in paths if path.name.startswith(f"{module}.")), None)
        if path is None:
            raise _refusal(
                target, f"{tree.root} has no vllm/{module}.abi3.so", "a CUDA build of vLLM"
            )
        objects = gpu_objects(path)
        required = FAMILY_CODE[target.capabilities[0][0]].get(module, ())
        shown = path.relative_to(tree.root)
        if any(one.name for one in objects):
            _check_required(objects, required, target, shown)
            _check_loadable(objects, target, shown)
        elif required:
            _check_nameless(objects, target, shown)
    _check_own_kernels(tree, target)


def _check_own_kernels(tree: Tree, target: Target) -> None:
    """Check that every source of nibble-kernels, where it is installed for GPUs, has code of the a
    or f kind for all the target's GPUs.
    """
    for path in own_modules(tree):
        shown = path.relative_to(tree.root)
        lacking = [one for one in gpu_objects(path) if not _has_family_code(one.codes, target)]
        if lacking:
            what = f"{shown} has {lacking[0].name} for {_codes(lacking[0].codes)}"
            raise NibbleError(
                ExitCode.VERIFY,
                what=f"{target.name} cannot use these nibble-kernels: {what}",
                expected=_expected(target),
                action=f"build them with ./build.sh {target.name} --kernels",
            )


def own_modules(tree: Tree) -> list[Path]:
    """nibble-kernels' module with GPU code, if it is installed."""
    return sorted(tree.path("nibble_kernels").glob("_cuda.*.so"))


def compiled_modules(tree: Tree) -> list[Path]:
    """The extension modules of vLLM in a tree, sorted."""
    return sorted(tree.path("vllm").rglob("*.so"))


def summary(tree: Tree) -> list[str]:
    """One line for each module with GPU code: its CUDA version, and the number of objects with code
    for each architecture.
    """
    return [
        _line(path, path.relative_to(tree.root))
        for path in [*compiled_modules(tree), *own_modules(tree)]
        if gpu_objects(path)
    ]


def _line(path: Path, shown: Path) -> str:
    objects = gpu_objects(path)
    counts = Counter(code for one in objects for code in set(one.codes))
    built = ", ".join(f"{code} in {counts[code]}" for code in sorted(counts))
    runtime = f"CUDA {version}" if (version := _cuda_version(path)) else "no CUDA runtime"
    return f"{shown}: {runtime}; of {len(objects)} objects {built}"


def _cuda_version(path: Path) -> str:
    found = (re.fullmatch(r"libcudart\.so\.(\d+)", name) for name in needed_libraries(path))
    return next((match[1] for match in found if match), "")


def _check_cuda(tree: Tree, path: Path, target: Target) -> None:
    version = _cuda_version(path)
    if version and int(version) < OLDEST_CUDA:
        shown = path.relative_to(tree.root)
        raise _refusal(
            target,
            f"{shown} of vLLM {tree.version} is a CUDA {version} build (libcudart.so.{version})",
            f"libcudart.so.{OLDEST_CUDA}, because CUDA 12 builds have FP4 code for exactly 10.0"
            f" or 12.0"
            " (100a, 120a) at most",
        )


def _check_required(
    objects: tuple[GpuObject, ...], required: tuple[str, ...], target: Target, shown: Path
) -> None:
    """Check that each named object has code of the a or f kind that all the target's GPUs load."""
    present = {one.name: one.codes for one in objects}
    lacking = [name for name in required if not _has_family_code(present.get(name, ()), target)]
    if lacking:
        codes = present.get(lacking[0])
        has = f"{lacking[0]} for {_codes(codes)}" if codes else f"no {lacking[0]}"
        raise _refusal(target, f"{shown} has {has}{_others(lacking)}", _expected(target))


def _check_loadable(objects: tuple[GpuObject, ...], target: Target, shown: Path) -> None:
    """Check that every object with code for the target's family has code for each of its GPUs."""
    major = target.capabilities[0][0]
    for one in objects:
        meant = any(code.sm // 10 == major for code in one.codes)
        stuck = [c for c in target.capabilities if not any(code.runs_on(c) for code in one.codes)]
        if meant and stuck:
            raise _refusal(
                target,
                f"{shown} has {one.name} for {_codes(one.codes)}",
                f"code that {stuck[0][0]}.{stuck[0][1]} loads",
            )


def _check_nameless(objects: tuple[GpuObject, ...], target: Target, shown: Path) -> None:
    if not any(_has_family_code(one.codes, target) for one in objects):
        every = tuple({code for one in objects for code in one.codes})
        has = f"code for {_codes(every)}" if every else "no GPU code"
        raise _refusal(target, f"{shown} has {has} (and no symbol table)", _expected(target))


def _has_family_code(codes: tuple[Code, ...], target: Target) -> bool:
    fit = [code for code in codes if code.suffix and not code.is_ptx]
    return all(any(code.runs_on(capability) for code in fit) for capability in target.capabilities)


def _codes(codes: tuple[Code, ...]) -> str:
    return ", ".join(str(code) for code in sorted(codes))


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more objects that lack it)" if names[1:] else ""


def _expected(target: Target) -> str:
    return " or ".join(_fitting(target))


def _fitting(target: Target) -> Iterator[str]:
    """The architecture that the target's GPUs load: 120f or 121a; with several, one that all of
    them load.
    """
    family = target.torch_cuda_arch_list.replace(".", "")
    yield family
    if len(target.capabilities) == 1:
        major, minor = target.capabilities[0]
        if (own := f"{major}{minor}a") != family:
            yield own


def _refusal(target: Target, what: str, expected: str) -> NibbleError:
    return NibbleError(
        ExitCode.VERIFY,
        what=f"{target.name} cannot use this vLLM: {what}",
        expected=expected,
        action="install the wheel of vllm 0.32.0 or newer from PyPI, or build with CUDA 13 and"
        f" TORCH_CUDA_ARCH_LIST={target.torch_cuda_arch_list}, its CMakeLists.txt unchanged",
    )


def main(root: str, target: str) -> None:
    """Print the GPU code of each module; raise if the target cannot use it."""
    tree = open_tree(Path(root))
    for line in summary(tree):
        print(line)
    check_binaries(tree, load_target(target))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: python -m nibble.engine.gpu_code ROOT TARGET", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    try:
        main(*sys.argv[1:])
    except NibbleError as refused:
        print(f"error: {refused.line()}", file=sys.stderr)
        sys.exit(refused.code)
