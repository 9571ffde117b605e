"""``tmd simulate`` and ``tmd advise``: what a standby is worth, in virtual time.

The engine (:mod:`tmd.simulate.engine`) plays a trace of faults against one way of going on. The way
of tmd asks the real policies and the real planner (:mod:`tmd.simulate.cluster`); its rivals are
modelled. Nothing here reads a clock, and a seed gives the same result everywhere.
"""
