#!/usr/bin/env bash
# HAProxy with haproxy.cfg before two servers of this machine, asked through HTTP: `try.sh [PROGRAM] [-m MODEL]`, by
# default target/release/moebius with the built-in model. Exit code 0 says that all held; 77 that there is no HAProxy or
# no Python. `try.sh PROGRAM --load FILE` measures throughput with and without the proxy, for `tools/scale.py two FILE`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
program=$here/../../target/release/moebius
case ${1:-} in "" | -*) ;; *) program=$1; shift ;; esac
# Where the distribution puts it.
export PATH=$PATH:/usr/sbin MOEBIUS_CONFIG=
for tool in haproxy python3; do command -v "$tool" >/dev/null || { echo "skipped: no $tool"; exit 77; }; done
exec python3 "$here/try.py" "$program" "${TRY_FOLDER:-$here/../../target/proxy}" "$@"
