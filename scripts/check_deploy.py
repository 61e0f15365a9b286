#!/usr/bin/env python3
"""What a schema cannot say of the manifest. With --config, prints the configuration in it."""

import sys
from pathlib import Path

import yaml

MANIFEST = Path(__file__).resolve().parents[1] / "deploy/kubernetes/vllm-with-sidecar.yaml"


def main():
    documents = {d["kind"]: d for d in yaml.safe_load_all(MANIFEST.read_text())}
    if "--config" in sys.argv:
        print(documents["ConfigMap"]["data"]["da-sidecar.toml"])
        return
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    sidecar = next(c for c in pod["initContainers"] if c["name"] == "da-sidecar")
    vllm = next(c for c in pod["containers"] if c["name"] == "vllm")
    check(sidecar["restartPolicy"] == "Always", "the sidecar is native")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        target = sidecar[probe]["httpGet"]
        check(target["port"] == "admin", f"{probe} asks the admin port")
        check(target["path"] in ("/livez", "/readyz"), f"{probe} does not depend on vLLM")
    check(sidecar["securityContext"]["readOnlyRootFilesystem"], "the sidecar's root is read-only")
    volumes = {v["name"] for v in pod["volumes"]}
    for container in pod["initContainers"] + pod["containers"]:
        for mount in container["volumeMounts"]:
            check(mount["name"] in volumes, f"{container['name']} mounts a volume that exists")
    drafts = [m for m in vllm["volumeMounts"] if m["mountPath"] == "/var/lib/draft-adapter"]
    check(drafts and drafts[0].get("readOnly"), "vLLM only reads the drafts")
    port = documents["Service"]["spec"]["ports"][0]["targetPort"]
    check(port in {p["name"] for p in sidecar["ports"]}, "the Service leads to the sidecar")
    selector = documents["Service"]["spec"]["selector"]
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    check(selector.items() <= labels.items(), "the Service selects the pod")
    print(f"{MANIFEST.name}: sidecar, probes, mounts and Service fit together")


def check(holds, claim):
    if not holds:
        sys.exit(f"error: {MANIFEST.name}: not true that {claim}")


if __name__ == "__main__":
    main()
