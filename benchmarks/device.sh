#!/usr/bin/env bash
# Copyright 2026 The nnx_ext Authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

# Checks and measures the package on a machine that has no network, in one run
# of at most eight minutes, from the root of the repository:
#
#   bash benchmarks/device.sh OUT [WHEELS]
#
# OUT is the folder for what it makes, WHEELS one with wheels of the packages
# that the machine lacks. A step that fails does not keep the later ones from
# running; the exit status is 1 if any has failed. Optional variables:
#
#   PYTHON         the interpreter (python3)
#   SIZES          of the cases (gpu on a GPU, else small)
#   TOTAL_SECONDS  after which only the tables are made (460)
#   CHECK_SECONDS  at most for the checks (130)
#   SUITE_SECONDS  at most for the three benchmark files together (330)
#   TORCH_PYTHON   an interpreter with PyTorch and PEFT, to measure beside

set -uo pipefail

if (($# < 1 || $# > 2)) || [[ ! -f benchmarks/device.sh ]]; then
  echo 'usage, from the root: bash benchmarks/device.sh OUT [WHEELS]' >&2
  exit 2
fi
out=$1
wheels=${2-}
python=${PYTHON:-python3}
total=${TOTAL_SECONDS:-460}
check=${CHECK_SECONDS:-130}
suite=${SUITE_SECONDS:-330}
mkdir -p "$out" || exit 2

export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
# Memory is taken as it is needed, so that PyTorch finds some beside.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

SECONDS=0 # counted on by the shell
failed=()

left() { # seconds; at least one
  local seconds=$((total - SECONDS))
  echo $((seconds > 1 ? seconds : 1))
}

least() { # of two numbers
  echo $(($1 < $2 ? $1 : $2))
}

step() { # TITLE LIMIT COMMAND...
  local title=$1 limit=$2 begun=$SECONDS status
  shift 2
  printf '\n=== %s\n' "$title"
  timeout --kill-after=5 "$(least "$limit" "$(left)")" "$@"
  status=$?
  if ((status)); then
    failed+=("$title")
    printf '*** FAILED with %d: %s\n' "$status" "$title"
  fi
  printf '=== %s: %d s, %d s in all\n' "$title" $((SECONDS - begun)) "$SECONDS"
  return "$status"
}

lacks() { # MODULE
  ! "$python" -c 'import importlib.util as util, sys
sys.exit(util.find_spec(sys.argv[1]) is None)' "$1"
}

install() { # what is lacking of MODULE=PACKAGE...
  local pair package status=0
  local options=(--quiet --no-index --find-links "$wheels")
  # Of an interpreter that a system manages, too.
  export PIP_BREAK_SYSTEM_PACKAGES=1
  for pair in "$@"; do
    package=${pair#*=}
    lacks "${pair%%=*}" || continue
    echo "installing $package"
    # With what it needs, or without where a wheel of that is missing.
    "$python" -m pip install "${options[@]}" "$package" ||
      "$python" -m pip install "${options[@]}" --no-deps "$package" ||
      status=1
  done
  return "$status"
}

if [[ -n $wheels ]]; then
  export -f install lacks
  export python wheels
  # Where a need cannot be fetched, --no-deps leaves it to this list.
  step 'installing what is lacking' 90 bash -c 'install "$@"' install \
    flax=flax optax=optax wadler_lindig=wadler-lindig jaxtyping=jaxtyping \
    typeguard=typeguard absl=absl-py safetensors=safetensors pytest=pytest \
    cpuinfo=py-cpuinfo pytest_benchmark=pytest-benchmark qwix=qwix \
    equinox=equinox paramax=paramax
fi

step 'versions and the device' 60 "$python" -c '
import json
from benchmarks import environment
print(json.dumps(environment.describe(), indent=1))'

step 'results beside float64' "$check" "$python" -m benchmarks.device_checks

step 'ceilings' 60 "$python" -c '
from benchmarks import environment
ceilings = environment.ceilings()
print("{:.4g} Tflop/s in a matrix product".format(ceilings["flops"] / 1e12))
print("{:.4g} GB/s in a copy".format(ceilings["bytes"] / 1e9))'

sizes=${SIZES:-$("$python" -c '
import jax
print("gpu" if jax.default_backend() == "gpu" else "small")')}
options=(--sizes "$sizes" -q ${TORCH_PYTHON:+--torch-python "$TORCH_PYTHON"})
names=(multi_grad reparam lora)
# Time to write the results is kept; what one file leaves is of those after it.
end=$(least $((SECONDS + suite)) $((total - 30)))
results=()
for i in "${!names[@]}"; do
  name=${names[i]}
  share=$(((end - SECONDS) / (${#names[@]} - i)))
  share=$((share > 5 ? share : 5))
  result=$out/$name.json
  rm -f "$result"
  # A step that has begun is ended; the limit is for one that hangs.
  step "bench_$name at sizes $sizes, $share s" $((share + 45)) \
    "$python" -m pytest -c benchmarks/pytest.ini "benchmarks/bench_$name.py" \
    "${options[@]}" --deadline "$share" --benchmark-json="$result"
  # Empty where nothing was measured.
  if [[ -s $result ]]; then
    results+=("$result")
  fi
done

total=$((total + 20)) # for this alone, which takes a second
step 'tables' 20 "$python" -m benchmarks.report "${results[@]}" \
  --name device --to "$out/results" --no-plots

printf '\n%d s in all; %d failed\n' "$SECONDS" "${#failed[@]}"
if ((${#failed[@]})); then
  printf '  %s\n' "${failed[@]}"
  exit 1
fi
