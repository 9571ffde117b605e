"""``tmd campaign``: plays scenarios of faults on real clusters and compares the results.

``campaign`` plays the stories in ``scenarios`` with the kinds of fault in ``faults``, on a
``stage`` of real daemons, launchers and workers. ``oracle`` compares losses and weights with an
undisturbed run, and ``judge`` the plans and alerts with what the scenario expects. The CLI and the
end-to-end tests call it. It may import all of tmd; nothing in the daemon or the trainer imports it.
"""
