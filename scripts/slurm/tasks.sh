#!/usr/bin/env bash
# Start a command as the tasks of a SLURM job, one per GPU; used by pretrain.sh in place of torchrun.
#
#   bash scripts/slurm/tasks.sh COMMAND...
#
# Each task gets its rank and the world size in torchrun's environment variables. The exit status is the highest of all
# tasks.
set -euo pipefail
# shellcheck disable=SC2016 # each task expands its own variables
exec srun --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c \
  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"' task "$@"
