"""``tmd simulate`` and ``tmd advise``: what a standby is worth, in virtual time.

The engine (:mod:`tmd.simulate.engine`) plays a trace of faults against one recovery setup: a
method of going on after a loss, and a number of standbys. The setup of tmd asks the real policies
and the real planner (:mod:`tmd.simulate.cluster`); the others are modelled. Nothing here reads a
clock, and a seed gives the same result everywhere.
"""
