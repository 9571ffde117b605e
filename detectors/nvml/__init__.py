"""Health of NVIDIA GPUs from NVML. The worker process imports this, too: nothing heavy here."""
