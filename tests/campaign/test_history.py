"""A recorded history is judged without knowing what broke."""

import json

from tmd.campaign.history import OBEYED, WROTE, Entry, recorded, unlawful


def wrote(host, lease, revision=1):
    return Entry(WROTE, host, lease, "job", revision)


def obeyed(host, lease, worker="w"):
    return Entry(OBEYED, host, lease, worker, 1)


def test_leaders_that_follow_each_other_are_lawful():
    history = [wrote("h1", 5), obeyed("h1", 5), wrote("h2", 6), obeyed("h1", 6), obeyed("h2", 5)]

    assert unlawful(history) == []


def test_two_that_write_under_one_lease_are_not():
    assert unlawful([wrote("h1", 5), wrote("h2", 5)]) == ["h1 and h2 both wrote under lease 5"]


def test_who_obeys_an_older_leader_is_not():
    history = [obeyed("h1", 6), obeyed("h1", 5, "other"), obeyed("h1", 5)]

    assert unlawful(history) == ["h1 ordered w by lease 5 after lease 6"]


def test_a_new_worker_of_a_job_obeys_no_older_leader_either():
    """Each loss gives a worker another name. Another job may have an older record."""
    job = [obeyed("h1", 6, "h1/job/0.a"), obeyed("h1", 5, "h1/other/0.a")]

    assert unlawful(job) == []
    assert unlawful([*job, obeyed("h1", 5, "h1/job/0.b")]) == [
        "h1 ordered h1/job/0.b by lease 5 after lease 6"
    ]


def test_entries_are_read_from_the_logs(tmp_path):
    lines = [
        {"event": "decided", "job": "job", "revision": 3, "lease_epoch": 7},
        {"event": "directive", "worker": "h1/job/0.a", "revision": 3, "lease_epoch": 7},
        {"event": "leading", "lease_epoch": 7},
    ]
    (tmp_path / "h1").mkdir()
    text = "\n".join(map(json.dumps, lines)) + '\nplain words\n{"lease_epoch": 9, "eve'
    (tmp_path / "h1" / "daemon.log").write_text(text)

    assert list(recorded(tmp_path)) == [
        Entry(WROTE, "h1", 7, "job", 3),
        Entry(OBEYED, "h1", 7, "h1/job/0.a", 3),
    ]
