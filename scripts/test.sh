#!/usr/bin/env bash
# The same environment with the test extras, then the checks and the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
prepare "[test]"
cd "$ROOT"
step "ruff"
"$VENV/bin/ruff" check --quiet .
step "kdagen check"
"$VENV/bin/kdagen" check
step "pytest"
"$VENV/bin/python" -m pytest -n "${KDAGEN_TEST_WORKERS:-2}" --dist worksteal "$@"
