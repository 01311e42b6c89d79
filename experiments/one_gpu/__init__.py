"""What one GPU does by plain PyTorch: matrix products, attention, other kernels, the host, whole training steps.

    python -m experiments.one_gpu OUT [--seconds N] [--parts kernels,host,sustained,steps]

Writes tables of the columns of `experiments/published/data` to OUT: `python -m experiments.kernels OUT` holds the
kernels against the model, `python -m experiments.published --sets one_gpu --data OUT` the steps.
"""
