#!/usr/bin/env bash
# Runs a command and says how long it took: scripts/timed.sh NAME COMMAND...
set -uo pipefail
name=$1
shift
printf '== %s: %s\n' "$name" "$*"
start=$SECONDS
"$@"
code=$?
if [ $code -eq 0 ]; then
    printf '== %s: ok, %d s\n' "$name" $((SECONDS - start))
else
    printf '== %s: FAILED with %d after %d s\n' "$name" $code $((SECONDS - start)) >&2
fi
exit $code
