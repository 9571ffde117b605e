"""``tmd kubernetes run``: the operator that keeps Kubernetes and tmd in agreement.

:mod:`tmd.kubernetes.api` reads and writes objects of the API server, :mod:`tmd.kubernetes.operator`
looks at both sides and carries out what :mod:`tmd.core.planning.kubernetes` decides. Only these
modules import kopf and lightkube.
"""
