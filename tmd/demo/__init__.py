"""``tmd demo``: a job of four ranks on five hosts of one machine, from which tmd moves ranks.

``train`` is the script that users copy from, ``cluster`` starts real daemons, launchers and Redis
on this machine, ``story`` tells what happens to them, and ``report`` reads what the ranks did.
Campaign, benchmarks and end-to-end tests use ``cluster`` and ``report``, too. It may import all of
tmd but the campaign.
"""
