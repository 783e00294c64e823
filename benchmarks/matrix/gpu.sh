#!/usr/bin/env bash
# What a GPU that is lent for a quarter of an hour is used for: the tests that need one, the speed
# of the torch engine, and with all that is left the matrix. Everything is written under $OUT.
#
#   OUT        folder of the results, must be set
#   DEVICE     cuda, or cpu for a rehearsal
#   BUDGET     time of the matrix (7m)
#   PROCESSES  targets that are judged at once (10)
#   TARGETS    names, instead of those of benchmarks/matrix/device.py
#   TESTS      seconds for the tests and as many for the speed (60); 0 leaves both out
#   WORK       folder of the journal: called again with the same, the matrix goes on
set -u
: "${OUT:?must be a folder for the results}"
DEVICE=${DEVICE:-cuda} BUDGET=${BUDGET:-7m} PROCESSES=${PROCESSES:-10} TESTS=${TESTS:-60}
WORK=${WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/npattn-gpu} PYTHON=${PYTHON:-python3}
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$OUT" "$WORK"
if [ -d .wheels ] && [ ! -d "$WORK/site" ]; then
  "$PYTHON" benchmarks/matrix/carry.py install "$WORK/site" >"$OUT/wheels.txt" 2>&1
fi
export PYTHONPATH="$PWD:$WORK/site${PYTHONPATH:+:$PYTHONPATH}"

if [ "$TESTS" -gt 0 ]; then
  sizes=(--lengths 1024 2048 4096) workers=4
  [ "$DEVICE" = cpu ] && sizes=(--small) workers=0
  timeout -s INT -k 5 "$TESTS" "$PYTHON" -m pytest -q -n "$workers" -p no:cacheprovider -m gpu \
    tests/torch tests/testing/device >"$OUT/tests.txt" 2>&1
  echo "pytest -m gpu: exit code $?" | tee -a "$OUT/tests.txt"
  timeout -s INT -k 5 "$TESTS" "$PYTHON" -m benchmarks.speed.scripts.gpu --device "$DEVICE" \
    "${sizes[@]}" --json "$OUT/speed.json" >"$OUT/speed.txt" 2>&1
  echo "speed: exit code $?" | tee -a "$OUT/speed.txt"
fi

pack() {  # what is known, in one file each, also if this script is killed
  for name in journal json; do
    [ -f "$WORK/matrix.$name" ] && gzip -c "$WORK/matrix.$name" >"$WORK/packed" \
      && mv "$WORK/packed" "$OUT/matrix.$name.gz"
  done
}
asked=(--resume "$WORK/matrix.journal")
if [ ! -f "$WORK/matrix.journal" ]; then
  asked=(--device "$DEVICE" --journal "$WORK/matrix.journal")
  [ -n "${TARGETS:-}" ] && asked+=(--targets "$TARGETS")
fi
(while sleep 20; do pack; done) &
packer=$!
trap 'kill "$packer"' EXIT  # of a signal too
"$PYTHON" -m benchmarks.matrix "${asked[@]}" --budget "$BUDGET" -n "$PROCESSES" \
  --json "$WORK/matrix.json" --markdown "$OUT/matrix.md" >"$OUT/matrix.txt" 2>&1
code=$?
trap - EXIT
kill "$packer"
pack
echo "matrix: exit code $code"
tail -n 60 "$OUT/matrix.txt"
exit "$code"
