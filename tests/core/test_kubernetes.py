"""What Kubernetes and tmd tell each other."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import alert, member, plan, record
from tmd.core.planning.kubernetes import (
    Condition,
    KubernetesChanges,
    KubernetesNode,
    KubernetesRules,
    NodeDrain,
    changes,
)
from tmd.core.planning.scheduler_drains import observed
from tmd.core.values.model import (
    ClusterView,
    HostStatus,
    JobState,
    Membership,
    Move,
    Phase,
    Severity,
    Strategy,
)
from tmd.core.values.requests import DrainRequest
from tmd.testing.clients import worker_status

RUNBOOK = "https://docs/runbook"
RULES = KubernetesRules(RUNBOOK, hosts_share=1.0)
FAULT = alert(code="nvml.ecc", severity=Severity.FATAL, strategy=Strategy.ACT, message="row\nbad")
BAN = alert(code="host.banned", severity=Severity.WARNING, message="came back")
WELL = Condition("True", "NoFinding", "tmd holds the host fit for ranks", "t0")
BAD = Condition("False", "NvmlEcc", f"nvml.ecc: row bad ({RUNBOOK})", "t0")
SILENT = Condition("Unknown", "NoHeartbeat", "the daemon of tmd on this node is silent", "t0")
ASKED = NodeDrain("nvsentinel", "d1", "n1", "XID 79")
OURS = DrainRequest("n1", "r", by="kubernetes: DrainRequest d1: XID 79")
RESERVED = DrainRequest("n1", "r", by="kubernetes: node n1 is cordoned", reserve=True)


def host(name, *alerts):
    return HostStatus(name, "i", alerts=alerts)


def view(*hosts, **parts):
    return ClusterView(hosts=hosts, **parts)


def agreed(view, nodes, asked=(), *, now=5000.0, rules=RULES):
    """The changes, for hosts that have been seen as they are for a long time. Nodes are well,
    unless a test says otherwise."""
    known = observed({}, view, {}, 0.0)
    return changes(view, nodes, asked, records=known, now=now, rules=rules)


def node(name, *, condition=WELL, **parts):
    return KubernetesNode(name, f"uid-{name}", condition=condition, **parts)


# --- from Kubernetes to tmd -----------------------------------------------------------------------

CORDONED = "kubernetes: node n1 is cordoned"
REQUESTED = "kubernetes: DrainRequest d1: XID 79"
UNNAMED = "kubernetes: DrainRequest d1"


@pytest.mark.parametrize(
    ("cordoned", "asked", "drain"),
    [
        (False, (), None),
        (True, (), CORDONED),
        (False, (ASKED,), REQUESTED),
        (True, (ASKED,), REQUESTED),
        (False, (structs.replace(ASKED, reason=""),), UNNAMED),
        (False, (structs.replace(ASKED, name="d2"), ASKED), REQUESTED),
        (False, (structs.replace(ASKED, complete=True),), REQUESTED),
        (False, (structs.replace(ASKED, node="other"),), None),
    ],
)
def test_a_cordon_or_a_drain_request_drains_the_host(cordoned, asked, drain):
    """With the reason; a DrainRequest that is complete stands until it is deleted. For it, and not
    for a cordon, the host gets no rank at all: somebody waits to take it away."""
    found = agreed(view(host("n1")), [node("n1", cordoned=cordoned)], asked)

    assert found.drain == (() if drain is None else (("n1", drain),))
    assert found.barred == ({"n1"} if drain in (REQUESTED, UNNAMED) else set())


@pytest.mark.parametrize("cordoned", [False, True])
@pytest.mark.parametrize(
    ("request_", "withdrawn"), [(OURS, True), (DrainRequest("n1", "r", by="ann"), False)]
)
def test_only_what_kubernetes_has_set_is_withdrawn(cordoned, request_, withdrawn):
    """An uncordoned node gives back its own request; nothing is asked for twice."""
    found = agreed(view(host("n1"), drains=(request_,)), [node("n1", cordoned=cordoned)])

    assert found.drain == ()
    assert found.undrain == (("n1",) if withdrawn and not cordoned else ())


def test_a_drain_goes_on_while_one_of_two_causes_is_left():
    """NVSentinel deletes its request while the node is still cordoned."""
    there = view(host("n1"), drains=(OURS,))

    assert agreed(there, [node("n1", cordoned=True)]).undrain == ()
    assert agreed(there, [node("n1")], (structs.replace(ASKED, complete=True),)).undrain == ()


@pytest.mark.parametrize(
    ("before", "asked", "barred"),
    [
        (RESERVED, (ASKED,), True),
        (RESERVED, (), False),
        (OURS, (ASKED,), False),
        (OURS, (), False),
        (structs.replace(RESERVED, by="ann"), (ASKED,), False),
        (structs.replace(RESERVED, leave=True), (ASKED,), False),
    ],
    ids=["reserve", "a cordon alone", "barred", "served", "of another", "leaves"],
)
def test_a_drain_that_only_holds_a_host_in_reserve_is_replaced_for_a_drain_request(
    before, asked, barred
):
    """Its host could get a rank again after a loss. That of another is left alone; one that bars
    stays until the node is uncordoned."""
    there = view(host("n1"), drains=(before,))
    found = agreed(there, [node("n1", cordoned=True)], asked)

    assert found.drain == ((("n1", REQUESTED),) if barred else ())
    assert (found.barred, found.undrain) == ({"n1"} if barred else set(), ())


@pytest.mark.parametrize("by", ["kubernetes: node n1 is cordoned", "ann"])
@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_a_drain_whose_workers_stay_is_replaced_once_they_are_to_leave(by, leave, left):
    """The operator was started again with --leave: they would keep their pods for ever."""
    there = view(host("n1"), drains=(structs.replace(RESERVED, by=by, leave=left),))
    rules = structs.replace(RULES, leave=leave)
    found = agreed(there, [node("n1", cordoned=True)], rules=rules)

    due = leave and not left and by != "ann"
    assert found.drain == ((("n1", RESERVED.by),) if due else ())


def test_a_node_without_tmd_is_left_alone():
    """Neither drained, nor marked, nor is its DrainRequest completed: that is reported."""
    foreign = structs.replace(ASKED, node="other")
    other = node("other", cordoned=True, condition=None)
    found = agreed(view(host("n1")), [node("n1"), other], (foreign,))

    assert found == KubernetesChanges(problems=found.problems)
    assert found.problems == (
        "DrainRequest nvsentinel/d1 is left alone: node other has no host of tmd",
    )


def test_an_annotation_names_the_host_of_a_node():
    """It overrides the name, also when it names no host at all."""
    there = view(host("n1"), host("gpu-7"))
    nodes = [node("n1", host="gone", cordoned=True), node("n2", host="gpu-7", cordoned=True)]

    assert agreed(there, nodes).drain == (("gpu-7", "kubernetes: node n2 is cordoned"),)


def test_nodes_that_claim_one_host_are_left_alone_and_named():
    nodes = [node("n1", cordoned=True), node("n2", host="n1")]
    found = agreed(view(host("n1")), nodes)

    assert found.drain == ()
    assert "nodes n1, n2 are left alone: each is taken for host n1" in found.problems[0]


def test_a_short_name_means_its_only_host():
    assert agreed(view(host("n1.example")), [node("n1", cordoned=True)]).drain[0][0] == "n1.example"


def test_where_room_is_short_a_drain_request_comes_before_a_cordon():
    nodes = [node("n1", cordoned=True), node("n2", cordoned=True)]
    order = structs.replace(ASKED, node="n2")
    found = agreed(view(host("n1"), host("n2")), nodes, (order,), rules=KubernetesRules(RUNBOOK))

    assert [name for name, _ in found.drain] == ["n2"]
    assert found.problems[0].startswith("host n1 is not drained yet: ")


@pytest.mark.parametrize(
    ("there", "undrain", "problems"),
    [
        (view(drains=(OURS,)), ("n1",), 0),
        (view(host("n1"), drains=(OURS,)), (), 1),
        (view(drains=(OURS,), jobs=(record("n1"),)), (), 1),
        (view(drains=(OURS,), unread=("n1",)), (), 1),
    ],
    ids=["gone", "alive", "holds a rank", "of a later release"],
)
def test_the_request_of_a_deleted_node_goes_with_its_host(there, undrain, problems):
    """One whose daemon still runs, or that holds a rank, is not given back: that is reported."""
    found = agreed(there, [])

    assert (found.undrain, len(found.problems)) == (undrain, problems)


@pytest.mark.parametrize("hosts", [(), (host("n1"),)], ids=["silent", "alive"])
@pytest.mark.parametrize("cordoned", [False, True])
def test_a_node_that_is_not_selected_is_left_alone_with_its_drain(hosts, cordoned):
    """It is there: another operator may look after it. Neither is it drained, marked or completed;
    of a DrainRequest for it that is reported."""
    other = node("n1", cordoned=cordoned, selected=False, condition=None)
    there = view(*hosts, drains=(OURS,))

    assert agreed(there, [other]) == KubernetesChanges()
    assert agreed(view(*hosts), [other], (ASKED,)).drain == ()
    assert agreed(there, [other], (ASKED,)) == KubernetesChanges(
        problems=(
            "DrainRequest nvsentinel/d1 is left alone: node n1 lacks the labels of --selector",
        )
    )


def test_the_drain_of_a_node_that_two_claim_is_not_withdrawn():
    """Though its host is silent: there are nodes for it."""
    there = view(drains=(OURS,))
    found = agreed(there, [node("n1"), node("n2", host="n1")])

    assert (found.undrain, len(found.problems)) == ((), 1)


# --- a DrainRequest is complete -------------------------------------------------------------------

LIVE = plan(Membership(2, (member("n1"),)), phase=Phase.SWITCH)
GIVEN = plan(
    Membership(2, (member("n2"),)),
    phase=Phase.SWITCH,
    moves=(Move(rank=0, leaver=member("n1"), joiner=member("n2")),),
)
"""It takes the rank off n1, which gets it back if n2 is lost before it has committed."""


@pytest.mark.parametrize(
    ("parts", "complete"),
    [
        ({"drains": (OURS,)}, True),
        ({"drains": (DrainRequest("n1", "r", by="ann"),)}, True),
        ({"drains": (DrainRequest("n1", "r", leave=True),)}, True),
        ({"drains": ()}, False),
        ({"drains": (DrainRequest("n1", "r", soft=True),)}, False),
        ({"drains": (RESERVED,)}, False),
        ({"drains": (DrainRequest("n1", "r", reserve=True, leave=True),)}, True),
        ({"drains": (OURS,), "jobs": (record("n2"),)}, True),
        ({"drains": (OURS,), "jobs": (record("n1"),)}, False),
        ({"drains": (OURS,), "jobs": (record("n1", state=JobState.FINISHED),)}, True),
        ({"drains": (OURS,), "jobs": (record("n2", plan=LIVE),)}, False),
        (
            {
                "drains": (OURS,),
                "jobs": (record("n2", plan=structs.replace(LIVE, phase=Phase.DONE)),),
            },
            True,
        ),
        ({"drains": (OURS,), "jobs": (record("n2", plan=GIVEN),)}, False),
        ({"drains": (OURS,), "unread": ("n9",)}, True),
        ({"drains": (OURS,), "unread_jobs": ("other",)}, True),
    ],
)
def test_a_drain_request_is_complete_when_no_rank_is_or_comes_there(parts, complete):
    """A request that keeps ranks away also after a loss must stand. No daemon need say so."""
    served = ((ASKED, "host n1 holds no rank and gets none"),) if complete else ()
    there, silent = (view(*hosts, **parts) for hosts in ((host("n1"),), ()))

    assert agreed(there, [node("n1")], (ASKED,)).complete == served
    if not parts.get("unread_jobs"):
        assert agreed(silent, [node("n1")], (ASKED,)).complete == served


@pytest.mark.parametrize(
    ("hosts", "parts", "names"),
    [
        (("n1",), {"unread": ("n9",)}, ""),
        ((), {"unread": ("n1",)}, "n1"),
        (("n1",), {"unread_jobs": ("other",)}, ""),
        (("n1",), {"unread_jobs": ("job", "other")}, "job"),
        ((), {"unread_jobs": ("other",)}, "other"),
    ],
    ids=["another host", "the host", "another job", "a job there", "the host is silent"],
)
def test_only_what_may_give_the_host_a_rank_must_be_readable(hosts, parts, names):
    """A host of a later release elsewhere keeps no other host waiting. What does is named."""
    waits = structs.replace(host("n1"), workers=(worker_status("n1/job/0.a"),))
    there = view(*(waits for _ in hosts), drains=(OURS,), **parts)
    found = agreed(there, [node("n1")], (ASKED,))

    assert bool(found.complete) == (not names)
    why = f"the status of {names} cannot be read: update tmd here"
    waits = f"DrainRequest nvsentinel/d1 waits: {why}"
    assert [p.rpartition(",")[0] for p in found.problems] == ([waits] if names else [])


def test_the_condition_of_a_host_of_a_later_release_stays_as_it_is():
    """It is not silent."""
    assert agreed(view(unread=("n1",)), [node("n1")]).mark == ()


@pytest.mark.parametrize(
    ("rank", "jobs", "complete"),
    [
        (0, (), False),
        (None, (), True),
        (0, (record("n2", state=JobState.FINISHED),), True),
    ],
)
def test_a_worker_that_says_it_holds_a_rank_is_believed(rank, jobs, complete):
    """Redis may have lost the record of its job. One of a job that has ended holds nothing."""
    worker = structs.replace(worker_status("n1/job/0.a"), rank=rank)
    status = structs.replace(host("n1"), workers=(worker,))
    found = agreed(view(status, drains=(OURS,), jobs=jobs), [node("n1")], (ASKED,))

    assert bool(found.complete) == complete


def test_a_drain_request_is_complete_only_once_every_leader_has_seen_the_drain():
    """One may just have decided on a view without it. A drain that replaces it counts anew."""
    there = view(host("n1"), drains=(OURS,))
    first = observed({}, there, {}, 100.0)
    later = observed(first, there, {}, 101.9)
    anew = observed(later, view(host("n1"), drains=(structs.replace(OURS, id="s"),)), {}, 102.0)

    def complete(records, now):
        return bool(
            changes(there, [node("n1")], (ASKED,), records=records, now=now, rules=RULES).complete
        )

    assert not complete(first, 100.0)
    assert not complete(later, 101.9)
    assert complete(later, 102.0)
    assert not complete(anew, 103.9)


def test_a_drain_request_is_completed_once():
    done = structs.replace(ASKED, complete=True)

    assert agreed(view(host("n1"), drains=(OURS,)), [node("n1")], (done,)) == KubernetesChanges()


def test_a_drain_request_is_not_complete_in_the_look_that_begins_the_drain():
    """Only what Redis has taken counts."""
    found = agreed(view(host("n1")), [node("n1")], (ASKED,))

    assert (len(found.drain), found.complete) == (1, ())


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            {"drains": (DrainRequest("n1", "r", by="ann", soft=True),)},
            "the soft drain by ann host n1",
        ),
        (
            {"drains": (structs.replace(RESERVED, by="slurm: disk"),)},
            "the drain in reserve by slurm: disk host n1 may take ranks again",
        ),
        ({"drains": (RESERVED,)}, ""),
        (
            {"jobs": (record("n1"),), "paused": True},
            "host n1 holds a rank, and the cluster is paused",
        ),
        ({"jobs": (record("n2"),), "paused": True}, ""),
        ({"jobs": (record("n1"),)}, ""),
    ],
)
def test_what_keeps_a_drain_request_waiting_until_somebody_acts_is_said(parts, says):
    """Not what ends by itself."""
    found = agreed(view(host("n1"), **{"drains": (OURS,), **parts}), [node("n1")], (ASKED,))

    assert len(found.problems) == bool(says)
    assert says in "".join(found.problems)


# --- from tmd to Kubernetes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "status", "after", "event"),
    [
        (None, host("n1"), "True", None),
        (None, host("n1", FAULT), "False", "NvmlEcc"),
        (None, None, None, None),
        (WELL, host("n1"), None, None),
        (WELL, host("n1", FAULT), "False", "NvmlEcc"),
        (WELL, host("n1", BAN), "False", "HostBanned"),
        (WELL, None, "Unknown", None),
        (BAD, host("n1"), "True", "NoFinding"),
        (BAD, host("n1", FAULT), None, None),
        (BAD, host("n1", structs.replace(FAULT, message="x")), "False", None),
        (BAD, host("n1", structs.replace(FAULT, code="nic.x")), "False", "NicX"),
        (BAD, None, None, None),
        (SILENT, host("n1"), "True", None),
        (SILENT, host("n1", FAULT), "False", "NvmlEcc"),
        (SILENT, None, None, None),
    ],
)
def test_the_condition_of_a_node_follows_its_host(before, status, after, event):
    """Every case of the condition that is there and of the host: well, unfit, silent. An Event
    tells of a finding and of its end."""
    hosts = () if status is None else (status,)
    mark = agreed(view(*hosts, jobs=(record("n1"),)), [node("n1", condition=before)]).mark

    assert [m.condition.status for m in mark] == ([] if after is None else [after])
    assert [m.event.reason for m in mark if m.event] == ([] if event is None else [event])


def test_a_finding_is_told_with_its_code_and_the_runbook():
    ((marked),) = agreed(view(host("n1", FAULT)), [node("n1")]).mark

    assert marked.condition == structs.replace(BAD, since="")
    assert marked.event.message == BAD.message
    assert marked.event.warns


def test_the_time_of_the_last_change_stays_while_the_status_does():
    other = structs.replace(FAULT, message="x")
    (marked,) = agreed(view(host("n1", other)), [node("n1", condition=BAD)]).mark

    assert marked.condition.since == BAD.since


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": Strategy.OBSERVE},
        {"strategy": Strategy.ADVISE},
        {"severity": Severity.WARNING},
        {"job": "gpt"},
    ],
    ids=str,
)
def test_a_finding_that_does_not_make_a_host_unfit_marks_no_node(changes):
    seen = view(host("n1", structs.replace(FAULT, **changes)))

    assert agreed(seen, [node("n1")]) == KubernetesChanges()


def test_a_node_is_healthy_again_only_after_a_while_without_a_finding():
    """A daemon that has just started has not looked yet; a silent one says nothing."""
    nodes = [node("n1", condition=BAD)]
    there = view(host("n1"))

    assert agreed(there, nodes, now=599.0).mark == ()
    assert [m.condition.status for m in agreed(there, nodes, now=600.0).mark] == ["True"]


def test_one_change_has_one_event_and_another_change_another():
    """The name is the same when an operator that was killed looks again."""
    seen = view(host("n1", FAULT))
    again = view(host("n1", structs.replace(FAULT, id="later")))
    names = [
        agreed(there, [node("n1", condition=before)]).mark[0].event.name
        for there, before in (
            (seen, WELL),
            (seen, WELL),
            (again, WELL),
            (seen, structs.replace(WELL, since="t1")),
        )
    ]

    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(name.startswith("n1.tmd-") for name in names)


def test_a_long_name_and_a_long_message_fit():
    long = structs.replace(FAULT, message="x" * 5000)
    name = ("a" * 62 + ".") * 4
    (marked,) = agreed(view(host(name, long)), [node(name)]).mark

    assert len(marked.event.name) <= 253
    assert len(marked.event.message) < 1024
    assert marked.condition.message.endswith(f"({RUNBOOK})")


# --- a silent host without a rank -----------------------------------------------------------------

GONE = "host n1 holds no rank and gets none"


@pytest.mark.parametrize(
    "of",
    [node("n1"), node("x", host="n1"), node("n1.example")],
    ids=["name", "annotation", "short"],
)
@pytest.mark.parametrize("heard", [True, False])
def test_a_node_whose_idle_host_falls_silent_is_not_healthy(of, heard):
    """After a while, since all hosts are silent when Redis starts anew. At once if that was before
    the operator started: the node has its condition."""
    records = observed({}, view(*[host("n1")] * heard), {}, 0.0)
    silent = observed(records, view(), {}, 1.0)

    def marked(now):
        found = changes(view(), [of], (), records=silent, now=now, rules=RULES)
        assert found.problems == ()
        return [m.condition.status for m in found.mark]

    assert marked(60.9) == ([] if heard else ["Unknown"])
    assert marked(61.0) == ["Unknown"]


def test_a_drain_request_for_a_silent_host_without_a_rank_is_served():
    """After a while: a Redis that has lost its data shows no rank for some time."""
    silent = observed(observed({}, view(host("n1")), {}, 0.0), view(), {}, 10.0)
    barred = view(drains=(OURS,))
    settled = observed(silent, barred, {}, 80.0)

    def look(there, records, now):
        return changes(there, [node("n1")], (ASKED,), records=records, now=now, rules=RULES)

    assert look(view(), silent, 69.9).drain == ()
    assert look(view(), silent, 69.9).problems == ()
    assert look(view(), silent, 70.0).drain == (("n1", REQUESTED),)
    assert look(view(), silent, 70.0).barred == {"n1"}
    assert look(barred, settled, 139.9).complete == ()
    assert look(barred, settled, 140.0).complete == ((ASKED, GONE),)


def test_a_silent_host_must_seem_free_all_the_time():
    """It still holds a rank, and a Redis that has lost its data has shown none for a moment."""
    looks = [
        (0.0, view(host("n1"))),
        (10.0, view()),
        (80.0, view(drains=(OURS,))),
        (100.0, view(drains=(OURS,), jobs=(record("n1"),))),
        (110.0, view(drains=(OURS,))),
    ]
    records = {}
    for now, there in looks:
        records = observed(records, there, {}, now)

    def complete(now):
        there = looks[-1][1]
        found = changes(there, [node("n1")], (ASKED,), records=records, now=now, rules=RULES)
        return found.complete

    assert complete(169.9) == ()
    assert complete(170.0) == ((ASKED, GONE),)


def test_a_drain_request_for_a_host_of_which_nothing_was_heard_is_left_to_people():
    """Which host it is is only presumed."""
    found = agreed(view(), [node("n1", cordoned=True)], (ASKED,))

    assert (found.drain, found.complete) == ((), ())
    assert "nothing was heard of host n1 since this operator started" in found.problems[0]


def test_the_host_that_is_heard_counts_before_one_that_was():
    """It has been renamed."""
    silent = observed({}, view(host("n1")), {}, 0.0)
    records = observed(silent, view(host("n1.example")), {}, 10.0)
    found = changes(
        view(host("n1.example")),
        [node("n1", cordoned=True)],
        (),
        records=records,
        now=1000.0,
        rules=RULES,
    )

    assert [name for name, _ in found.drain] == ["n1.example"]
    assert found.mark == ()
