"""Files for Prometheus and Grafana; the wheel has them as the package ``tmd_monitoring``."""
