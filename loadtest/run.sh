#!/usr/bin/env bash
# `make load`: runs Locust with all its reports against a service that this script starts, or against URL. Arguments go to Locust.
# From the environment: URL, LAYERS_DIR (.layers), REPORTS (reports), PYTHON (.venv/bin/python), LOCUST (.venv-load/bin/locust).
# Exits with Locust's status, or with 3 if the service does not become ready. It ends the processes that it started.
set -euo pipefail
# A shell cannot trap a signal that was ignored when it began, as SIGINT is in the background of another one.
if [ -z "${LOADTEST_SIGNALS:-}" ]; then LOADTEST_SIGNALS=default exec env --default-signal=INT,TERM "$0" "$@"; fi
unset LOADTEST_SIGNALS
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
reports=${REPORTS:-$root/reports} python=${PYTHON:-$root/.venv/bin/python} started=()
mkdir -p "$reports"
rm -f "$reports"/load.{html,json} "$reports"/load_*.csv

end() {
    for process in "${started[@]}"; do kill "$process" 2> /dev/null && wait "$process" || true; done
}
trap end EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

if [ -z "${URL:-}" ]; then
    : > "$reports/service.log"  # it is read before the service has begun
    ATTENTION_LOG_FORMAT=json "$python" -m service serve --host 127.0.0.1 --port 0 --layers-dir "${LAYERS_DIR:-$root/.layers}" > "$reports/service.log" 2>&1 &
    started=("$!")
    for _ in {1..600}; do
        port=$(sed -n 's/.*"event": *"serving".*"port": *\([0-9]*\).*/\1/p' "$reports/service.log")
        if [ -n "$port" ] && "$python" -m service health --url "http://127.0.0.1:$port" > /dev/null 2>&1; then URL=http://127.0.0.1:$port; break; fi
        kill -0 "${started[0]}" 2> /dev/null || break
        sleep 0.2
    done
    [ -n "${URL:-}" ] || { echo "make load: the service did not become ready; see $reports/service.log" >&2; exit 3; }
fi
"${LOCUST:-$root/.venv-load/bin/locust}" -f "$root/loadtest/locustfile.py" --headless --only-summary --host "$URL" \
    --html "$reports/load.html" --csv "$reports/load" --json-report "$reports/load.json" "$@" &
started=("$!" "${started[@]}")  # Locust ends first
wait "$!"
