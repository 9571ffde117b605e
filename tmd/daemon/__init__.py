"""Doing it on a host: the daemon. Never imports torch; only ``store`` knows Redis.

Read in this order: ``service`` (the parts), ``roster`` and ``agents`` (this host's workers),
``watcher`` (detectors), ``leader`` (decisions), ``records`` and ``executor`` (orders), ``bus`` and
``store`` (the cluster's shared memory).
"""
