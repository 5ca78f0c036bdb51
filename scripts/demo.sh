#!/bin/sh
# The main task from start to end: captures the bundled vec_add if this machine allows it, converts, prints what to open
# and what the recordings say.
set -eu
cd "$(dirname "$0")/.."
tracepipe=.venv/bin/tracepipe
mkdir -p build/demo

# Messages before tracepipe's error are not the reason.
cat_reason() { grep -m 1 '^tracepipe: ' build/demo/reason || sed -n 1p build/demo/reason; }

# The stand-in has its own libcuda, whose calls only probes see.
bundled=fixtures/capture-h200/input.jsonl
recording=$bundled
# Built with a relative path, as make accepts no folder with a space in its name.
if ! make -s -C fixtures/standin BUILD=../../build/standin 2>build/demo/reason; then
    echo "no capture here: $(cat_reason)"
elif ! $tracepipe capture --force --gpu off -o build/demo/run.jsonl -- build/standin/vec_add 2>build/demo/reason; then
    echo "no capture here: $(cat_reason)"
else
    cat build/demo/reason
    recording=build/demo/run.jsonl
fi
[ "$recording" = build/demo/run.jsonl ] || echo "taking the bundled recording $recording instead"

$tracepipe convert "$recording" --format perfetto --force -o build/demo/run.pftrace
$tracepipe convert "$recording" --format chrome --force -o build/demo/run.json
$tracepipe convert "$bundled" --force -o build/demo/warps.pftrace
cat <<END

Open in ui.perfetto.dev (drag it in), or here without a network: add --local
  .venv/bin/tracepipe open build/demo/run.pftrace      the run that was just converted
  .venv/bin/tracepipe open build/demo/warps.pftrace    a CUDA program on an H200: its calls, system calls, scheduling, every warp
END

if [ "$recording" != "$bundled" ]; then
    printf '\n$ tracepipe summary %s\n' "$recording"
    $tracepipe summary "$recording"
fi
printf '\n$ tracepipe summary %s\n' "$bundled"
$tracepipe summary "$bundled"
