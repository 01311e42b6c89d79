#!/bin/bash
#SBATCH --nodes=6   # of the allocation
#SBATCH --gres=gpu:4
python prepare.py --split train --out $OUT
N=$SLURM_NNODES
ARGS=" \
    --num-layers 8 --hidden-size 64 --num-attention-heads 4 \
    --seq-length 64 --rampup-batch-size 2 2 1_000 --global-batch-size 48 \
    "
config="./ds.$SLURM_JOB_ID.json"
cat <<EOT > $config
{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": ${ZERO:-1}}, "bf16": {"enabled": true}}
EOT
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 4 --nnodes $N \
    --rdzv_endpoint $HOST:6000 "
export CMD=" `pwd`/pretrain_gpt.py $ARGS --pipeline-model-parallel-size 3 --deepspeed --deepspeed_config $config "
echo $CMD
clear; srun --wait=60 bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
