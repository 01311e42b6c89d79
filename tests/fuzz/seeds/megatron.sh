#!/bin/bash
#SBATCH --nodes=4
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
TP=2
MODEL_ARGS=(
    --num-layers 16   # of the decoder
    --hidden-size 512 --num-attention-heads 8
    --group-query-attention --num-query-groups 4
    --seq-length $((1024*2)) --max-position-embeddings 2048
    --swiglu --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 32000
)
LOG="--log-interval 1"
torchrun --nproc_per_node ${GPUS} --nnodes=${NODES:-4} pretrain_gpt.py \
    "${MODEL_ARGS[@]}" $LOG --tensor-model-parallel-size $TP --pipeline-model-parallel-size=4 \
    --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --bf16 --use-distributed-optimizer \
    --micro-batch-size 1 --global-batch-size 64 --frobnicate 3 --data-path $(ls /data) --attention-dropout 0
