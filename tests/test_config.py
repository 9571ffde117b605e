"""The configuration: sources, errors, defaults."""

from __future__ import annotations

import os
import socket

import pytest
from msgspec import structs

from tmd.config import DEEPEST, Settings, find_file, load
from tmd.core.alerts.findings import FindingRules
from tmd.core.values.errors import ConfigError
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import Strategy
from tmd.folders import SOCKET, runtime_dir_of_user
from tmd.sections import LimitsSection, inline_secrets


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TMD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "tmd.toml"
        path.write_text(text)
        return path

    return write


def complaint(path):
    with pytest.raises(ConfigError) as raised:
        load(path)
    return str(raised.value)


def test_everything_has_a_default(write):
    settings = load(write(""))

    assert settings.host.name == socket.gethostname()
    assert settings.host.socket.name == "tmd.sock"
    assert settings.policies.enabled == ("replace_failed", "drain_requested")
    assert settings.limits.limits() == PlanLimits()


def test_limits_are_those_of_the_core():
    assert set(LimitsSection.__struct_fields__) == set(structs.asdict(PlanLimits()))


def test_variables_win_over_the_file(write, monkeypatch):
    path = write('[host]\nname = "a"\nttl_s = 5\n[leader]\nttl_s = 20')
    monkeypatch.setenv("TMD_HOST__NAME", "b")
    monkeypatch.setenv("TMD_POLICIES__ENABLED", '["observe_only"]')
    settings = load(path)

    assert (settings.host.name, settings.host.ttl_s) == ("b", 5)
    assert settings.policies.enabled == ("observe_only",)
    assert settings.leader.ttl_s == 20


def test_the_trainers_variables_are_not_configuration(write, monkeypatch):
    for name in ("TMD_SOCKET", "TMD_JOB", "TMD_HOST", "TMD_WORKER", "TMD_LOG"):
        monkeypatch.setenv(name, "x")

    assert load(write("")).host.name == socket.gethostname()


def test_the_socket_follows_the_runtime_dir(write):
    assert str(load(write('[host]\nruntime_dir = "/x"')).host.socket) == "/x/tmd.sock"
    assert str(load(write('[host]\nsocket = "/y/s"')).host.socket) == "/y/s"


def test_the_file_may_be_named_by_a_variable(write, monkeypatch):
    path = write('[cluster]\nname = "c"')
    monkeypatch.setenv("TMD_CONFIG", str(path))

    assert find_file(None) == path
    assert load().cluster.name == "c"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[redis]\nurll = 'x'", "unknown key [redis] urll; did you mean 'url'?"),
        ("[reddis]\nurl = 'x'", "unknown key reddis; did you mean 'redis'?"),
        ("[leader]\nttl_s = 'soon'", "[leader] ttl_s: expected `float`, got `str`"),
        ("[leader]\nttl_s = 5\nrenew_s = 3", "ttl_s must be at least twice renew_s"),
        ("[host]\nttl_s = 0.5", "ttl_s must be at least twice heartbeat_s"),
        ("[host]\nname = 'a/b'", "[host] name"),
        (f"[host]\nruntime_dir = '/{'x' * 120}'", "choose a shorter runtime_dir"),
        ("[detectors.trainer]\nstrategy = 'shout'", "[detectors.trainer] strategy"),
        ("[log", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_file_key_and_remedy(write, text, expected):
    path = write(text)
    message = complaint(path)

    assert str(path) in message
    assert expected in message


def test_each_kind_of_value_may_come_from_a_variable(write, monkeypatch):
    """Words are words, whatever they look like; lists and tables are JSON."""
    given = {
        "TMD_HOST__NAME": "17",
        "TMD_HOST__STANDBY": "yes",
        "TMD_HOST__HEARTBEAT_S": "0.5",
        "TMD_HOST__STATE_DIR": "/var/x",
        "TMD_HOST__USERS": '["alice"]',
        "TMD_BREAKER__MOVES": "7",
        "TMD_HTTP__LISTEN": "7471",
        "TMD_CLUSTER__SECRET": "1234567890123456",
        "TMD_WEBHOOK__HEADERS": '{"X": "y"}',
        "TMD_DETECTORS__TRAINER__HOLD_S": "3",
        "TMD_DETECTORS__NIC__EXPECT": '["eth1"]',
        "TMD_DETECTORS__NIC__SYS_ROOT": "/sys",
        "TMD_DETECTORS__XID": '{"strategy": "advise", "quiet_s": 5}',
        "TMD_POLICIES__DRAIN_DEGRADED__REPEATED": "true",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = load(write("[detectors.nic]\npoll_s = 1"))
    host = settings.host

    assert (host.name, host.standby, host.heartbeat_s) == ("17", True, 0.5)
    assert (str(host.state_dir), host.users) == ("/var/x", ("alice",))
    assert (settings.breaker.moves, settings.http.address) == (7, ("127.0.0.1", 7471))
    assert settings.secret() == b"1234567890123456"
    assert settings.webhook.headers["X"].reveal() == "y"
    assert settings.detector("trainer").hold_s == 3
    assert settings.detector("trainer").strategy is Strategy.ACT
    assert settings.detector("xid").strategy is Strategy.ADVISE
    assert settings.detector("xid").own == {"quiet_s": 5}
    assert settings.policies.own == {"drain_degraded": {"repeated": True}}
    assert settings.detector("nic").own == {"poll_s": 1, "expect": ["eth1"], "sys_root": "/sys"}


def test_one_entry_of_a_table_may_come_from_a_variable(write, monkeypatch):
    monkeypatch.setenv("TMD_WEBHOOK__HEADERS__X", "y")
    headers = load(write("[webhook]\nheaders = {Z = 'a'}")).webhook.headers

    assert {name: value.reveal() for name, value in headers.items()} == {"Z": "a", "x": "y"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis = 3", "redis: expected a table of keys"),
        ("detectors = 3", "detectors: expected a table for each detector"),
        ("[detectors]\nxid = 3", "[detectors] xid: expected a table of keys"),
        ("[policies]\nown = 3", "the only one is 'enabled'"),
        ("[redis]\ntimeout_s = 0", "[redis] timeout_s: expected `float` > 0.0"),
        ("[host]\nstate_dir = 3", "[host] state_dir: expected `str`, got `int`"),
        ("[cluster]\nsecret = 3", "[cluster] secret: expected `str`, got `int`"),
        ("[http]\nlisten = 'x'", "[http] listen: write host:port"),
        (
            "[log]\nlevel = 'loud'",
            "[log] level: expected one of 'debug', 'info', 'warning', 'error'",
        ),
    ],
)
def test_a_value_of_another_kind_is_named(write, text, expected):
    assert expected in complaint(write(text))


def test_a_key_named_like_the_place_of_own_keys_is_one_of_them(write):
    settings = load(write("[detectors.x]\nown = 1"))

    assert settings.detector("x").own == {"own": 1}


def test_every_mistake_is_named(write):
    message = complaint(write("[redis]\nurll = 'x'\n[leader]\nrenew_s = 'y'"))

    assert len(message.splitlines()) == 2


def test_a_mistake_in_a_variable_names_the_variable(write, monkeypatch):
    monkeypatch.setenv("TMD_LEADER__TTLS", "9")
    assert "TMD_LEADER__TTLS: unknown key [leader] ttls; did you mean 'ttl_s'?" in complaint(
        write("")
    )
    monkeypatch.delenv("TMD_LEADER__TTLS")
    monkeypatch.setenv("TMD_LEADERS__TTL_S", "9")
    assert "TMD_LEADERS__TTL_S: unknown section; did you mean 'leader'?" in complaint(write(""))


def test_a_variable_is_blamed_for_what_it_says_instead_of_the_file(write, monkeypatch):
    monkeypatch.setenv("TMD_LEADER__TTL_S", "soon")

    assert "TMD_LEADER__TTL_S: [leader] ttl_s" in complaint(write("[leader]\nttl_s = 9"))


@pytest.mark.parametrize(
    ("text", "variable", "place"),
    [
        ("cluster = 'prod'", "TMD_CLUSTER__SECRET", "cluster"),
        ("redis = 'redis://x'", "TMD_REDIS__URL", "redis"),
        ("[detectors]\nnic = 3", "TMD_DETECTORS__NIC__STRATEGY", "detectors.nic"),
    ],
)
def test_a_variable_does_not_hide_a_mistake_of_the_file(write, monkeypatch, text, variable, place):
    """Where the file has a value in place of the table in which the variable sets a key."""
    monkeypatch.setenv(variable, "act")
    file = write(text)

    assert complaint(file) == (
        f"{file}: {place}: expected a table of keys, as {variable} sets one in it"
    )


@pytest.mark.parametrize("section", ["cluster", "redis", "webhook"])
def test_a_section_that_is_no_table_holds_no_secret(section):
    assert inline_secrets({section: "x", "log": 3}) == []


def test_a_variable_sets_a_key_of_a_table_that_another_one_states(write, monkeypatch):
    monkeypatch.setenv("TMD_DETECTORS__NIC__HOLD_S", "7")
    monkeypatch.setenv("TMD_DETECTORS__NIC", '{"strategy": "act", "hold_s": 3}')
    nic = load(write("")).detector("nic")

    assert (nic.strategy, nic.hold_s) == (Strategy.ACT, 7)


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'[' * 100_000}",
        f"x = {'[' * (DEEPEST + 1)}{']' * (DEEPEST + 1)}",
        f"{'.'.join('x' * 2000)} = 1",
    ],
)
def test_a_file_with_too_many_levels_is_a_mistake(write, text):
    assert f"tables and lists stand more than {DEEPEST} levels deep" in complaint(write(text))


def test_a_default_that_does_not_fit_is_named(write, monkeypatch):
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"/{'x' * 120}")

    assert "choose a shorter runtime_dir" in complaint(write(""))


def test_a_missing_file_is_an_error(tmp_path):
    assert "no configuration file" in complaint(tmp_path / "none.toml")


def test_production_needs_a_redis_and_a_secret(write):
    settings = load(write("[cluster]\nsecret = 'short'"))
    with pytest.raises(ConfigError, match="TMD_REDIS__URL"):
        settings.redis_url()
    with pytest.raises(ConfigError, match="openssl"):
        settings.secret()


def test_the_secret_may_come_from_a_private_file(write, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o600)
    path = write(f"[cluster]\nsecret_file = '{secret}'")

    assert load(path).secret() == b"0123456789abcdef"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        load(path).secret()


def test_a_secret_of_any_bytes_is_the_same_from_a_file_and_from_the_environment(
    write, tmp_path, monkeypatch
):
    """As ``head -c 32 /dev/urandom`` makes them."""
    content = bytes(range(200, 240))
    secret = tmp_path / "secret"
    secret.write_bytes(content + b"\n")
    secret.chmod(0o600)
    of_file = load(write(f"[cluster]\nsecret_file = '{secret}'")).secret()
    monkeypatch.setenv("TMD_CLUSTER__SECRET", os.fsdecode(content))

    assert of_file == load(write("")).secret() == content


def test_a_path_that_can_be_no_path_is_refused(write):
    settings = load(write('[cluster]\nsecret_file = "/etc/\\u0000x"'))

    with pytest.raises(ConfigError, match=r"secret_file '/etc/\\x00x': embedded null"):
        settings.secret()


@pytest.mark.parametrize("text", ["[host]\nttl_s = " + "1" * 5000, "[host]\nttl_s = \xff"])
def test_a_file_that_cannot_be_parsed_is_refused(write, text):
    path = write("")
    path.write_bytes(text.encode("latin-1"))

    assert "is not valid TOML" in complaint(path)


def test_a_variable_of_endless_depth_is_refused(write, monkeypatch):
    monkeypatch.setenv("TMD_POLICIES__ENABLED", "[" * 100_000)

    assert "TMD_POLICIES__ENABLED" in complaint(write(""))


@pytest.mark.parametrize("key", ["host]\nttl_s", "leader]\nttl_s", "redis]\ntimeout_s"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
def test_a_time_without_an_end_is_refused(write, key, value):
    """Timers and Redis know none."""
    assert "expected `float`" in complaint(write(f"[{key} = {value}"))


def test_each_job_has_its_own_key(write):
    keys = load(write("[cluster]\nsecret = '0123456789abcdef'")).job_keys()
    other = load(write("[cluster]\nsecret = '0123456789abcdeX'")).job_keys()

    assert len(keys("a")) == 32
    assert len({keys("a"), keys("b"), other("a")}) == 3
    assert keys("a") == keys("a")


def test_secrets_are_never_shown(write):
    settings = load(write("[cluster]\nsecret = '0123456789abcdef'"))

    assert "0123456789abcdef" not in repr(settings)


def test_the_renewal_never_outlives_the_lease():
    """Patroni's law: renew + 2 * answer <= ttl."""
    leader = Settings().leader

    assert leader.renew_s + 2 * leader.answer_s <= leader.ttl_s


def test_only_the_trainer_detector_acts_by_default(write):
    settings = load(write("[detectors.other]\nlimit = 3"))

    assert settings.detector("trainer").strategy is Strategy.ACT
    assert settings.detector("other").strategy is Strategy.OBSERVE
    assert settings.detector("other").own == {"limit": 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("url = 'hooks.example/T0/hidden'", "[webhook] url: it must begin with http://"),
        ("url = 'http://[hidden'", "[webhook] url: it must begin with http://"),
        ('headers = {X = "hidden\\n"}', "header 'X' has characters"),
        ("events = ['hidden']", "[webhook] events: expected one of 'alerts', 'migrations'"),
    ],
)
def test_a_mistake_in_a_secret_does_not_show_it(write, text, expected):
    message = complaint(write(f"[webhook]\n{text}"))

    assert expected in message
    assert "hidden" not in message


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("", None),
        ("7471", ("127.0.0.1", 7471)),
        (":7471", ("127.0.0.1", 7471)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
        ("node7:80", ("node7", 80)),
    ],
)
def test_a_port_alone_means_the_loopback(write, listen, address):
    assert load(write(f"[http]\nlisten = '{listen}'")).http.address == address


@pytest.mark.parametrize("listen", ["localhost", "h:", "h:x", "h:65536", "h:-1"])
def test_no_port_is_a_mistake(write, listen):
    assert "[http] listen: write host:port" in complaint(write(f"[http]\nlisten = '{listen}'"))


def test_the_token_must_be_private_and_long(write, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    http = load(write(f"[http]\ntoken_file = '{token}'")).http

    assert http.token().reveal() == "0123456789abcdef"
    token.write_text("short")
    with pytest.raises(ConfigError, match=r"\[http\] token_file"):
        http.token()
    token.unlink()
    with pytest.raises(ConfigError, match=r"\[http\] token_file"):
        http.token()
    assert load(write("")).http.token() is None


def test_a_misspelt_key_beside_the_policies_is_no_policy(write):
    assert "enabled" in complaint(write('[policies]\nenable = ["observe_only"]'))


def test_triage_is_set_up_per_detector_and_for_all(write):
    settings = load(write("[triage]\nrepeats = 5\nwindow_h = 2\n[detectors.nic]\nhold_s = 7"))

    assert settings.triage.rules(settings.detector("nic")) == FindingRules(7.0, 5, 7200.0)
    assert settings.triage.rules(settings.detector("xid")).hold_s == 0


@pytest.mark.parametrize(
    ("there", "found"),
    [((), "own"), (("own",), "own"), (("service",), "service"), (("own", "service"), "own")],
)
def test_a_user_finds_the_daemon_that_runs_as_a_service(tmp_path, there, found):
    """Unless one of their own runs; the folder of that is the default where none does."""
    for name in there:
        (tmp_path / name).mkdir()
        (tmp_path / name / SOCKET).touch()

    assert runtime_dir_of_user(tmp_path / "own", tmp_path / "service") == tmp_path / found
