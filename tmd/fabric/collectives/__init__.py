"""The collective algorithms: functions over a :class:`~tmd.fabric.collectives.op.Op`."""
