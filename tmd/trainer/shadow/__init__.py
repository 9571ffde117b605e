"""Feeds a shadow: ``source`` streams a rank's state and outputs, ``session`` applies them.

``sources`` accepts shadows on the rank's side, ``receiver`` sorts the frames on the shadow's side.
``planned`` is the session of a planned move, up to the switch, and ``replay`` that of a rehearsal,
from recorded frames. The worker package starts both sides. It imports
:mod:`tmd.trainer.state_transfer`, :mod:`tmd.trainer.protocol` and :mod:`tmd.trainer.state`.
"""
