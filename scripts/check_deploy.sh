#!/usr/bin/env bash
# Checks deploy/ and dashboards/ as far as that goes without a cluster: schemas, rules, and that the
# sidecar accepts the example configuration.
set -euo pipefail
cd "$(dirname "$0")/.."

manifests=(deploy/kubernetes/*.yaml)
for version in 1.29.0 1.37.0; do
    .venv/bin/kubernetes-validate --strict --quiet -k "$version" "${manifests[@]}"
    echo "kubernetes $version: ${#manifests[@]} manifest(s) valid"
done

.venv/bin/python scripts/check_deploy.py

if command -v promtool >/dev/null; then
    promtool check rules dashboards/alerts.yaml
    promtool test rules dashboards/alerts_test.yaml
else
    echo "promtool is not installed: the alert rules are only checked by tests/dashboards.rs"
    echo "hint: apt-get install -y prometheus"
fi

sidecar=${CARGO_TARGET_DIR:-target}/debug/da-sidecar
if [ -x "$sidecar" ]; then
    "$sidecar" --config deploy/da-sidecar.example.toml config --show >/dev/null
    echo "deploy/da-sidecar.example.toml: every key is known"
    config=$(mktemp --suffix .toml)
    trap 'rm -f "$config"' EXIT
    .venv/bin/python scripts/check_deploy.py --config >"$config"
    "$sidecar" --config "$config" config --show >/dev/null
    echo "the manifest's configuration: every key is known"
else
    echo "da-sidecar is not built: the example configuration was not checked"
fi
