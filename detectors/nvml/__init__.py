"""Health of NVIDIA GPUs by NVML. The worker process imports this too: nothing heavy here."""
