#!/usr/bin/env bash
# Takes docs/images/locust.png anew: locust's page in Chromium while 64 streams run against a real server.
# The server answers with prompts' own tokens at a set pace (engine kind replay): the page is shown, not a model.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${INFLIGHT_BIN:-.venv/bin}
web_port=${WEB_PORT:-8089}
work=$(mktemp -d)
started=()
stop() {
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap stop EXIT

read -r http grpc metrics <<<"$("$bin/python" -c 'from inflight.serve.server import free_ports; print(*free_ports(3))')"
cat >"$work/deployment.yaml" <<END
model: $PWD/deployments/demo/model
engine: {kind: replay, replay_step_ms: 20}
batching: {max_batch_size: 64}
server: {http_port: $http, grpc_port: $grpc, metrics_port: $metrics, exit_timeout_s: 5}
END
"$bin/inflight" serve "$work" >"$work/server.log" 2>&1 &
started+=($!)
until curl -sf "http://127.0.0.1:$http/v2/models/ensemble/ready"; do sleep 0.5; done

"$bin/locust" -f loadtest/locustfile.py --autostart --users 64 --spawn-rate 4 --scenario streams-64 --tags stream \
    --host "http://127.0.0.1:$http" --grpc-url "127.0.0.1:$grpc" \
    --web-host 127.0.0.1 --web-port "$web_port" >"$work/locust.log" 2>&1 &
started+=($!)
sleep 40 # 24 of them with all users

# The page needs the time of some polls; --timeout would take the picture without waiting for them.
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,760 --virtual-time-budget=15000 \
    --screenshot=docs/images/locust.png "http://127.0.0.1:$web_port/?tab=stats" >/dev/null 2>&1
