#!/usr/bin/env bash
# From nothing to a running kdagen: a local environment, the packages this machine can use, then `kdagen demo`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
prepare ""
step "kdagen demo"
"$VENV/bin/kdagen" demo "$@"
