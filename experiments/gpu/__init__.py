"""The parts of `experiments.gpu_kernels`: checks, tuning, timing."""
