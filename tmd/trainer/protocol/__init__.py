"""The messages that workers exchange: step vote, shadow frames, offers of a state.

It defines and queues messages without any decision. It imports :mod:`tmd.trainer.state`.
"""
