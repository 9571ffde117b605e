"""Writes checkpoints in the format of ``torch.distributed.checkpoint`` and resumes from them.

``session.checkpoint`` sets it up. It imports :mod:`tmd.trainer.state_transfer` for the verification
of a state, and :mod:`tmd.trainer.state`.
"""
