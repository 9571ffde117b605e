"""Assigns ranks to workers: forms jobs, plans migrations and recoveries, elects the leader.

The leader calls :func:`tmd.core.planning.planning.steer` once a round; each daemon derives the
directives of its workers from the record that comes out. It imports :mod:`tmd.core.alerts` and
:mod:`tmd.core.values`.
"""
