"""What operators install; the wheel has it as the package ``tmd_systemd``."""
