#!/usr/bin/env bash
# pack_nibble.sh PARTS_DIR: compile nibble's kernels for SM90 against torch's stable ABI, and pack them and nibble into PARTS_DIR/nibble.tgz.
set -euo pipefail
parts=$(realpath "$1")
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${repo}/.venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "${scratch}"' EXIT

cp -r "${repo}/kernels" "${scratch}/kernels"
NIBBLE_KERNELS_COMPILE=0 "${python}" -m pip install -q --no-deps --no-build-isolation --no-index --target "${scratch}/site" "${scratch}/kernels"
cd "${scratch}/kernels"
torch=$("${python}" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
headers=$("${python}" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
flags=$(
  "${python}" - <<'PYTHON'
import ast, pathlib
names = {t.id: ast.literal_eval(n.value) for n in ast.parse(pathlib.Path("setup.py").read_text()).body
         if isinstance(n, ast.Assign) for t in n.targets if t.id in ("STABLE_ABI", "NVCC_FLAGS")}
print(*names["STABLE_ABI"], *names["NVCC_FLAGS"])
PYTHON
)
includes="-I src/nibble_kernels/include -I src -I src/nibble_kernels -I ${torch}/include -I ${torch}/include/torch/csrc/api/include -I ${headers}"
# shellcheck disable=SC2016 # the inner shell's own parameters
find src -name '*.cu' -print0 | xargs -0 -P "$(nproc)" -I{} sh -c 'nvcc $1 $2 -Xcompiler -fPIC -gencode=arch=compute_90a,code=sm_90a -c "$3" -o "$(echo "$3" | tr / _).o"' _ "${flags}" "${includes}" {}
# The CPU's torch has no libtorch_cuda. An empty library of that name is enough to link.
nvcc -shared -o "${scratch}/libtorch_cuda.so" -Xlinker -soname=libtorch_cuda.so -x cu /dev/null
nvcc -shared -cudart shared -o "${scratch}/site/nibble_kernels/_cuda.abi3.so" ./*.o \
  -Xlinker --no-as-needed -L"${torch}/lib" -L"${scratch}" -lc10 -ltorch_cpu -ltorch_cuda -ltorch
cp "$("${python}" -c 'import nibble_kernels, pathlib; print(pathlib.Path(nibble_kernels.__file__).parent / "_cpu.abi3.so")')" "${scratch}/site/nibble_kernels/"
mkdir "${scratch}/nibble"
git -C "${repo}" archive HEAD nibble pyproject.toml | tar -x -C "${scratch}/nibble"
"${python}" -m pip install -q --no-deps --no-build-isolation --no-index --target "${scratch}/site" "${scratch}/nibble"
rm -rf "${scratch}/site/nibble" # the source tree is imported instead
# Dependencies of nibble that vLLM does not bring along.
"${python}" -m pip install -q --no-deps --target "${scratch}/site" "gguf>=0.19,<1" "pyelftools>=0.32,<1"
# For the network namespaces of cluster_two_gpus.py.
if ip=$(command -v ip); then
  cp "${ip}" "${parts}/bin/"
  ldd "${ip}" | awk '$3 ~ /^\// && $1 !~ /^libc\.so/ {print $3}' | xargs cp -t "${parts}/bin"
fi
tar -C "${scratch}/site" -czf "${parts}/nibble.tgz" .
ls -l "${parts}/nibble.tgz"
