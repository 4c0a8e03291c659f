#!/bin/bash
# Tests and measurements of sharded experts on the GPUs of one host: results in $OUT after every step, 8 minutes at most.
#
#   OUT=results bash benchmarks/many_gpus.sh
#
# A step that fails or takes too long leaves its log, and the next one runs.
set -u
cd "$(dirname "$0")/.."
: "${OUT:=outputs/many_gpus}"
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS=8 TORCH_NCCL_ASYNC_ERROR_HANDLING=1
PYTHON=${PYTHON:-python}
START=$SECONDS
GPUS=$($PYTHON -c 'import torch; print(torch.cuda.device_count())')

step() { # name, seconds, command
    local name=$1 seconds=$2
    shift 2
    local left=$((475 - (SECONDS - START)))
    if [ "$left" -lt 20 ]; then
        echo "$name: no time left" | tee -a "$OUT/steps.txt"
        return
    fi
    [ "$seconds" -gt "$left" ] && seconds=$left
    local began=$SECONDS
    timeout -k 5 "$seconds" "$@" >"$OUT/$name.log" 2>&1
    echo "$name: exit $? after $((SECONDS - began)) s" | tee -a "$OUT/steps.txt"
    tail -n 3 "$OUT/$name.log"
}

bench() { # name, seconds, GPUs, script, arguments
    local name=$1 seconds=$2 gpus=$3 script=$4
    shift 4
    step "$name" "$seconds" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
        "benchmarks/$script" --json "$OUT/$name.json" "$@"
}

nvidia-smi topo -m >"$OUT/topology.txt" 2>&1
step tests2 120 "$PYTHON" -m pytest -q -s -m multigpu -k "[2-" tests/distributed/test_multigpu.py
[ "$GPUS" -ge 4 ] && step tests4 90 "$PYTHON" -m pytest -q -s -m multigpu -k "[4-" tests/distributed/test_multigpu.py
EP="2 4"
[ "$GPUS" -lt 4 ] && EP="2"
# shellcheck disable=SC2086
bench main 240 "$GPUS" bench_many.py --ep $EP --tokens 8192 32768 --sides local ours titan bound --trace "$OUT/trace"
bench fsdp_8k 90 "$GPUS" bench_fsdp.py --tokens 8192 --sides one ours ep2 grouped
bench fsdp_32k 120 "$GPUS" bench_fsdp.py --tokens 32768 --sides one ours grouped plain one ours
# shellcheck disable=SC2086
NCCL_MAX_CTAS=16 bench ctas16 90 "$GPUS" bench_many.py --ep $EP --tokens 8192 --sides local ours --free 0 16
# shellcheck disable=SC2086
NCCL_MAX_CTAS=8 bench ctas8 60 "$GPUS" bench_many.py --ep $EP --tokens 8192 --sides local ours --free 0 8
NCCL_MAX_CTAS=16 bench fsdp_ctas16 60 "$GPUS" bench_fsdp.py --tokens 32768 --sides ours --free 0 16
# shellcheck disable=SC2086
bench weights 60 "$GPUS" bench_many.py --ep $EP --tokens 8192 --sides local weights
echo "all steps: $((SECONDS - START)) s" | tee -a "$OUT/steps.txt"
