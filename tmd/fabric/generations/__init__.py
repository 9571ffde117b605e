"""Inner groups, such as those of NCCL, one after another behind a group whose members change.

The members of an inner group cannot be replaced. A change of members builds the next generation in
the background and then switches a pointer; a loss aborts all generations at once. The fabric of a
worker owns its :class:`Generations` and tells them of each change of epoch;
:class:`PassingGroup` passes the collectives of the script to them. It imports the values of
:mod:`tmd.core` and the groups of :mod:`tmd.fabric`.
"""
