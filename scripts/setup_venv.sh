#!/usr/bin/env bash
# Makes .venv with the pinned packages of the demo and the tests; does nothing when it is current.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=scripts/requirements.txt
stamp=.venv/requirements.txt
if cmp --silent "$wanted" "$stamp" && .venv/bin/python -c 'import openai' 2>/dev/null; then
    exit 0
fi
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    echo "error: python3 with venv is needed" >&2
    echo "hint: apt-get install -y python3 python3-venv" >&2
    exit 1
fi
rm -rf .venv
python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement "$wanted"
cp "$wanted" "$stamp"
