"""The bundle for support: everything that is asked for, and no secret."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import tmd
from tests.values import alert
from tmd.cli import bundle, scrubbing
from tmd.config import load, parse
from tmd.core.values.model import HostStatus
from tmd.daemon.store import open_store
from tmd.schema import MASK

CANARY = "canary7f3a"
PASSWORD = f"{CANARY}/pass@word"
PLANTED = {
    "cluster secret": f"{CANARY}-of-the-cluster-0123456789",
    "http token": f"{CANARY}-of-http-0123456789abcdef",
    "webhook": f"{CANARY}-path",
    "header": f"{CANARY}-header",
    "own": f"{CANARY}-own",
    "unit": f"{CANARY}-in-a-unit",
    "argument": f"{CANARY}-argument",
}
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}\n-----END RSA PRIVATE KEY-----"
LONG_PEM = PEM.replace(CANARY, f"{'x' * 64}\n" * 300 + CANARY)
SAYS = f"""#!/bin/sh
echo 'program {{name}} ran'
echo 'Environment=TMD_REDIS__URL=redis://tmd:{PLANTED["unit"]}@h/0 "TMD_LOG__LEVEL={CANARY}"'
echo 'Authorization: Bearer {PLANTED["unit"]}'
echo 'sent with {PLANTED["header"]} and {PLANTED["argument"]} and {PLANTED["cluster secret"]}'
echo 'mysql://root:{PLANTED["unit"]}@db api_key: "{PLANTED["unit"]}" db_password={PLANTED["unit"]}'
printf '%s\\n' '{PEM}'
"""


@pytest.fixture
def host(redis_url: str, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A configuration with a secret in every place that may hold one, and programs that print
    secrets. Returns the configuration file and an environment."""
    for name in ("cluster secret", "http token"):
        file = tmp_path / name.replace(" ", "-")
        file.write_text(PLANTED[name] + "\n")
        file.chmod(0o600)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("journalctl", "systemctl", "nvidia-smi"):
        (programs / name).write_text(SAYS.format(name=name))
        (programs / name).chmod(0o755)
    config = tmp_path / "tmd.toml"
    config.write_text(f"""
[cluster]
name = "bundle-{os.getpid()}"
secret_file = "{tmp_path}/cluster-secret"
[http]
token_file = "{tmp_path}/http-token"
[webhook]
url = "https://hooks.example/T0/{PLANTED["webhook"]}"
headers = {{ Authorization = "Bearer {PLANTED["header"]}" }}
[host]
name = "h1"
state_dir = "{tmp_path}/state"
socket = "{tmp_path}/s/trainers.sock"
[[detectors.exec.checks]]
name = "own"
command = ["/bin/true", "--token={PLANTED["own"]}", "--password", "{PLANTED["argument"]}"]
""")
    config.chmod(0o600)
    address = redis_url.removeprefix("redis://")
    url = f"redis://nobody:{urllib.parse.quote(PASSWORD, safe='')}@{address}"
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return config, {"TMD_REDIS__URL": url, "PATH": path, "TMD_EXAMPLE": CANARY}


def contents(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        return {
            member.name.removeprefix("tmd-bundle/"): archive.extractfile(member).read().decode()
            for member in archive.getmembers()
        }


def test_no_secret_is_in_the_bundle(host: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Planted in files, the environment, units, logs, and in the password that Redis refuses."""
    config, environment = host
    file = tmp_path / "bundle.tar.gz"
    done = tmd("doctor", "--bundle", file, "-c", config, env=environment)
    found = contents(file)

    assert file.stat().st_mode & 0o777 == 0o600
    assert {name for name, text in found.items() if CANARY in text} == set()
    assert CANARY not in done.stdout + done.stderr
    assert "program journalctl ran" in found["journal.txt"]
    assert MASK in found["journal.txt"]
    assert MASK in found["configuration.toml"]
    assert f"wrote {file}, secrets removed" in done.stderr


def test_no_login_of_sentinels_is_in_the_bundle(
    host: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """Nor that of the Redis servers, though none is reachable and a log quotes both."""
    config, environment = host
    servers, sentinels = f"{CANARY}@of:servers", f"{CANARY}+of sentinels"
    quoted = [urllib.parse.quote(word, safe="") for word in (servers, sentinels)]
    url = f"redis+sentinel://tmd:{quoted[0]}@127.0.0.1:1,127.0.0.1:2/tmd/0"
    login = f"?sentinel_username=watcher&sentinel_password={quoted[1]}"
    program = tmp_path / "programs" / "journalctl"
    program.write_text(
        f"#!/bin/sh\necho 'sent {servers} and {sentinels} and {' '.join(quoted)} on'\n"
    )
    file = tmp_path / "bundle.tar.gz"
    environment = {**environment, "TMD_REDIS__URL": url + login}
    done = tmd("doctor", "--bundle", file, "-c", config, env=environment)
    found = contents(file)

    assert {name for name, text in found.items() if CANARY in text} == set()
    assert CANARY not in done.stdout + done.stderr
    assert "127.0.0.1:1,127.0.0.1:2/tmd/0" in found["configuration.toml"]
    assert f"sent {MASK} and {MASK} and {MASK} {MASK} on" in found["journal.txt"]


def test_the_bundle_has_what_support_asks_for(redis_url: str, tmp_path: Path) -> None:
    """Also a secret that an alert quotes is removed."""
    config, secret = tmp_path / "tmd.toml", PLANTED["cluster secret"]
    config.write_text(f'[cluster]\nname = "b{os.urandom(4).hex()}"\n[redis]\nurl = "{redis_url}"\n')
    environment = {"TMD_CLUSTER__SECRET": secret, "TMD_HOST__STATE_DIR": str(tmp_path / "state")}

    async def fill() -> None:
        settings, _ = parse(
            {
                "cluster": {"name": load(config).cluster.name, "secret": secret},
                "redis": {"url": redis_url},
            }
        )
        assert settings is not None
        store = open_store(settings)
        try:
            await store.put_host(HostStatus("h1", "i"), ttl_s=60, wake=False)
            await store.publish_alert(alert(id="h1-9", message=f"check said {secret}!"))
        finally:
            await store.close()

    asyncio.run(fill())
    file = tmp_path / "bundle.tar.gz"
    tmd("doctor", "--json", "--bundle", file, "-c", config, env=environment)
    found = contents(file)
    about, state = json.loads(found["about.json"]), json.loads(found["state.json"])

    assert sorted(found) == sorted(
        [
            "about.json",
            "doctor.json",
            "configuration.toml",
            "state.json",
            "alerts.json",
            "metrics.txt",
            *bundle.COMMANDS,
        ]
    )
    assert "TMD_CLUSTER__SECRET" in about["variables"]
    assert any(package.startswith("redis ") for package in about["packages"])
    assert [h["host"] for h in state["hosts"]] == ["h1"]
    assert [a["message"] for a in json.loads(found["alerts.json"])] == [f"check said {MASK}!"]
    assert any(point["name"] == "redis" for point in json.loads(found["doctor.json"]))


def test_a_bundle_overwrites_no_file(host: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    config, environment = host
    file = tmp_path / "mine"
    file.write_text("mine")
    done = tmd("doctor", "--bundle", file, "-c", config, env=environment)

    assert done.returncode == 2
    assert "name another file" in done.stderr
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Authorization: Basic Y2FuYXJ5N2YzYQ==\nnext", "next"),
        ("redis://:canary7f3a@h:1/0 refused", "refused"),
        ("redis://u:canary7f3a:@/@h/0 refused", "refused"),
        ('{"token": "canary7f3a", "rank": 3}', '"rank": 3'),
        ("password=canary7f3a user=me", "user=me"),
        ("export TMD_WEBHOOK__URL='https://h/canary7f3a x' # set", "# set"),
        ("MYSQL_PASSWORD: canary7f3a\nrank: 1", "rank: 1"),
        (f"{PEM}\nafter", "after"),
        ("-----BEGIN PRIVATE KEY-----\ncanary7f3a cut off", MASK),
        ('secret_file = "/etc/tmd/secret"', "/etc/tmd/secret"),
        ('command = ["/bin/x", "--token", "canary7f3a", "--fast"]', "--fast"),
        ("x --api-key canary7f3a --fast", "--fast"),
        ("x --password 'canary7f3a b' --fast", "--fast"),
        ("curl -u me:canary7f3a http://h/", "http://h/"),
        ("requirepass canary7f3a\nport 1", "port 1"),
        ('CONFIG SET masterauth "a canary7f3a" ok', "ok"),
        ("sentinel auth-pass mine canary7f3a\nport 1", "port 1"),
        ("user tmd on >canary7f3a >b-canary7f3a ~* +@all", "~* +@all"),
        ("user tmd on #canary7f3a ~*", "~*"),
        ("key_passphrase = canary7f3a x", "x"),
        ("GET https://h/c?sig=canary7f3a&rank=1", "rank=1"),
        ("GET https://h/c?X-Amz-Signature=canary7f3a#a", "#a"),
        ("Set-Cookie: a=b; session=canary7f3a\nnext", "next"),
        ("https://canary7f3a@github.example/x", "github.example/x"),
        ("with ghp_canary7f3aabcdef was", "was"),
        ("with hf_canary7f3aabcdef was", "was"),
        ("with AKIACANARY7F3AABCD was", "was"),
        (f"{LONG_PEM}\nafter", "after"),
        ("password=abc,canary7f3a rank=1", "rank=1"),
        ('password="a\\"canary7f3a" rank=1', "rank=1"),
        ('tokens = ["a", "canary7f3a"]\nrank = 1', "rank = 1"),
        ('sent {\\"token\\": \\"canary7f3a\\", \\"rank\\": 1}', "rank"),
        ("password=a'canary7f3a rank=1", "rank=1"),
        ('password=a"canary7f3a" rank=1', "rank=1"),
        ('password="a"canary7f3a" rank=1', "rank=1"),
        ("password=a\\canary7f3a rank=1", "rank=1"),
        ('password="canary7f3a cut off\nnext', "next"),
        ("'password' => 'canary7f3a', 'rank' => 1", "'rank' => 1"),
        ("password := canary7f3a rank", "rank"),
        ("AUTH canary7f3a\nnext", "next"),
        ("AUTH tmd canary7f3a\nnext", "next"),
        ('1.2 [0 h:1] "auth" "tmd" "canary7f3a"\nnext', "next"),
        ('{"m": "\\"AUTH\\" \\"tmd\\" \\"canary7f3a\\" x"}', "x"),
        ('[0 h:1] "ACL" "SETUSER" "tmd" "on" ">canary7f3a" "~*"', '"~*"'),
        ('[0 h:1] "ACL" "SETUSER" "tmd" ">a canary7f3a" "~*"', '"~*"'),
        ('["ACL", "SETUSER", "tmd", ">canary7f3a", "~*"]', '"~*"'),
        ("redis-cli -h h -a canary7f3a PING", "PING"),
        ('["redis-cli", "-a", "canary7f3a", "PING"]', "PING"),
        ('password = """\na canary7f3a\n"canary7f3a" """\nrank = 1', "rank = 1"),
        ("password = '''\na canary7f3a\n'''\nrank = 1", "rank = 1"),
        ('{"body": "{\\"secret\\": \\"a b-canary7f3a\\"}"}', "body"),
    ],
)
def test_what_looks_like_a_secret_is_removed(text: str, kept: str) -> None:
    """Even if it is not a configured secret; the rest of the line stays."""
    left = scrubbing.scrubbed(text, ())

    assert "canary7f3a" not in left.lower()
    assert "Y2FuYXJ5" not in left
    assert kept in left


@pytest.mark.parametrize(
    "text",
    [
        "the token is refreshed every hour",
        "rank 3 on h1 uses cuda:0 and nic mlx5_0",
        "see https://docs.example/operate/runbook.html?rank=1#x",
        'secret_file = "/etc/tmd/secret"',
        "bypass: on, compass: north",
        "x --verbose --no-password --fast",
        "user 1000 ran a > b",
        "the auth of user ann is over",
        "tar -a archive; redis-cli PING",
        '{"text": "it\'s over", "rank": 1}',
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrubbing.scrubbed(text, ()) == text


def test_a_value_is_scrubbed_before_it_is_encoded() -> None:
    """Nothing is hidden by an escape, and what is left can be decoded."""
    text = 'the check said password="a\\"b canary7f3a", "twice"'
    value = {"token": 'a "canary7f3a', "n": [1, "--secret", "canary7f3a", None], "text": text}
    command = ["/usr/bin/redis-cli", "-a", "canary7f3a", "PING"]

    assert scrubbing.scrubbed_value(value, ()) == {
        "token": MASK,
        "n": [1, "--secret", MASK, None],
        "text": f'the check said password="{MASK}", "twice"',
    }
    assert scrubbing.scrubbed_value(command, ()) == ["/usr/bin/redis-cli", "-a", MASK, "PING"]


def test_keys_keep_their_names_though_one_is_a_known_secret() -> None:
    """Readers need the field names, and a secret that equals one protects nothing."""
    assert scrubbing.scrubbed_value({"workers": ["workers"]}, {"workers"}) == {"workers": [MASK]}


def test_only_what_looks_random_in_the_address_of_a_webhook_is_a_secret() -> None:
    """An ordinary word of the path would be masked everywhere."""
    url = "https://hooks.example/services/training/v1/T024BE91/abcdefghijklmnop"
    settings, problems = parse({"webhook": {"url": url}})
    assert settings is not None, problems
    secrets = scrubbing.secrets_of(settings)

    assert {"T024BE91", "abcdefghijklmnop", url} <= secrets
    assert secrets.isdisjoint({"services", "training", "v1"})


def test_long_texts_are_scrubbed_in_time() -> None:
    """Nothing in a log may make a pattern try over and over."""
    parts = (
        *("token ", "token=[", 'token=\\"', "user x ", "user x >", "a://b", "--secret ", '\\"'),
        *('token="""', "token='", "token=a'b", "AUTH ", "AUTH a", 'AUTH """', 'AUTH "a'),
        *("redis-cli -", 'redis-cli "-a'),
    )
    for part in (*parts, "-----BEGIN PRIVATE KEY-----", "-u a", "Cookie:"):
        assert scrubbing.scrubbed(part * 30_000, ())
        assert scrubbing.scrubbed((part * 50 + "\n") * 600, ())


def test_a_bundle_for_which_there_is_no_room_leaves_nothing(
    host: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """A file may be no larger than two blocks here, as on a disk that is full."""
    config, environment = host
    file = tmp_path / "bundle.tar.gz"
    command = [sys.executable, "-m", "tmd.cli", "doctor", "--bundle", file, "-c", config]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 2; exec "$@"', "bash", *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )

    assert done.returncode == 2, done.stderr
    assert "File too large" in done.stderr
    assert "name a place with room" in done.stderr
    assert not file.exists()


def test_each_form_of_a_known_secret_is_removed() -> None:
    """Verbatim, as quoted in a URL, and decoded from one."""
    given: dict[str, Any] = {"redis": {"url": "redis://u:a%2Fb%40cdef@h:1/0"}}
    settings, problems = parse(given)
    assert settings is not None, problems
    secrets = scrubbing.secrets_of(settings)

    assert {"a%2Fb%40cdef", "a/b@cdef"} <= secrets
    assert scrubbing.scrubbed("it was a/b@cdef and a%2Fb%40cdef", secrets) == (
        f"it was {MASK} and {MASK}"
    )
