"""Feeds a shadow: ``source`` streams a rank's state and outputs, ``session`` applies them.

``sources`` accepts shadows on the rank's side, ``receiver`` sorts the frames on the shadow's side,
and ``replay`` runs a rehearsal from recorded frames. The worker package starts both sides. It
imports :mod:`tmd.trainer.state_transfer`, :mod:`tmd.trainer.protocol` and
:mod:`tmd.trainer.state`.
"""
