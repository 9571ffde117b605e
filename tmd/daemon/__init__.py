"""The daemon of one host. It never imports torch; only ``store`` and its helpers use Redis.

It runs as ``tmd daemon`` or a service; trainers and the CLI talk to its socket, and other daemons
meet it in Redis. What it decides, :mod:`tmd.core` decides.

Read in this order: ``service`` (the parts), ``roster`` and ``agents`` (this host's workers),
``watcher`` (detectors), ``leader`` (decisions), ``records`` and ``record_sync`` (directives),
``bus`` and ``store`` (the cluster's shared state).
"""
