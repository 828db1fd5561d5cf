#!/usr/bin/env bash
# Start a command as the processes of a pod, one per GPU; used by pretrain.yaml in place of torchrun.
#
#   bash scripts/k8s/processes.sh COMMAND...
#
# Kubeflow's training operator sets torchrun's variables for the pod; this script sets them for each process, and forwards
# SIGTERM, which ends a pod. The exit status is the lowest nonzero one, since a fault that a restart cannot fix outweighs the
# others; torchrun would always exit with 1.
set -euo pipefail

for name in PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE; do
  if [[ ! ${!name:-} =~ ^[0-9]+$ ]]; then
    echo "error: $name is '${!name:-}', not a number; this is for pods of a PyTorchJob with nprocPerNode, as in pretrain.yaml" >&2
    exit 2
  fi
done

children=()
trap 'caught=1; kill -TERM "${children[@]}" 2>/dev/null || true' TERM
export WORLD_SIZE=$((PET_NNODES * PET_NPROC_PER_NODE))
for ((local_rank = 0; local_rank < PET_NPROC_PER_NODE; local_rank++)); do
  RANK=$((PET_NODE_RANK * PET_NPROC_PER_NODE + local_rank)) LOCAL_RANK=$local_rank "$@" &
  children+=("$!")
done

status=0
for child in "${children[@]}"; do
  # A signal ends the wait, not the process.
  caught=1
  while ((caught)); do
    caught=0
    wait "$child" && code=0 || code=$?
  done
  ((code == 0 || (status != 0 && status <= code))) || status=$code
done
exit "$status"
