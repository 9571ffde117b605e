"""The Debian package, installed by dpkg in a Debian that systemd has booted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import program
from tests.packaged.debian import booted, bootstrapped

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]

LIFE = r"""
active() { systemctl is-active tmd; }
pid() { systemctl show --property MainPID --value tmd; }
answers() { for _ in $(seq 100); do tmd status && return 0; sleep 0.3; done; return 1; }

dpkg -i /root/tmd.deb; fact installed $?
fact shell "$(getent passwd tmd | cut -d: -f7)"
fact new "$(active)"
fact version "$(tmd --version)"
sed -i 's|^url = .*|url = "redis://127.0.0.1:6379/0"|' /etc/tmd/tmd.toml
head -c 32 /dev/urandom | base64 | install -m 600 /dev/stdin /etc/tmd/secret
tmd config check; fact checked $?
systemctl enable --now tmd; fact started $?
answers; fact answers $?
tmd doctor; fact doctor $?
first=$(pid)
dpkg -i /root/tmd.deb; fact upgraded $?
answers; fact answers_again $?
[ "$(pid)" != "$first" ]; fact restarted $?
fact runs_as "$(stat -c %U /proc/$(pid))"

# As in a container that has mounted the folder.
mkdir -p /srv/job && mount --bind /run/tmd /srv/job
systemctl restart tmd; answers; fact lost_folder "$(ls /srv/job)"
umount /srv/job
install -D -m 644 /root/container.conf /etc/systemd/system/tmd.service.d/container.conf
systemctl daemon-reload; systemctl restart tmd; answers
mount --bind /run/tmd /srv/job
systemctl restart tmd; answers; fact answers_below $?
fact kept_folder "$(ls /srv/job/daemon | tr '\n' ' ')"
fact has_folder "$(ls /run/tmd/daemon | tr '\n' ' ')"
umount /srv/job; rm -r /etc/systemd/system/tmd.service.d; systemctl daemon-reload

dpkg -r tmd; fact removed $?
fact then "$(active)"
fact kept "$(ls /etc/tmd | tr '\n' ' ')"
fact again "$(dpkg -i /root/tmd.deb | grep ^tmd:)"
fact still "$(systemctl is-enabled tmd)"
dpkg -P tmd; fact purged $?
fact left "$(find /etc/tmd /usr/lib/tmd /usr/bin/tmd /var/lib/tmd /var/lib/private/tmd \
    /usr/share/doc/tmd /etc/systemd/system/*/tmd.service | tr '\n' ' ')"
"""


def drop_in(line: str) -> str:
    """The drop-in with ``line`` of the page on clusters."""
    page = (ROOT / "docs" / "start" / "cluster.md").read_text()
    (found,) = (b for b in re.findall(r"```ini\n(.+?)```", page, re.DOTALL) if line in b)
    return found


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What happened to a machine on which the package is installed, upgraded and removed."""
    program("systemd-nspawn", "systemd-container")
    folder = tmp_path_factory.mktemp("machine")
    root = bootstrapped(folder / "root")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", folder, ROOT],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (wheel,) = folder.glob("*.whl")
    built = subprocess.run(
        [ROOT / "packaging/deb/build", wheel, folder, "--constraint", ROOT / "constraints.txt"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    shutil.copy(built, root / "root/tmd.deb")
    (root / "root/container.conf").write_text(drop_in("RuntimeDirectory=tmd/daemon"))
    return booted(root, LIFE)


def test_the_package_installs_and_its_service_waits_for_a_secret(facts: dict[str, str]) -> None:
    """dpkg ends without an error, and starts nothing that lacks a secret."""
    assert facts["installed"] == "0"
    assert facts["version"].startswith("tmd ")
    assert facts["shell"] == "/usr/sbin/nologin"
    assert facts["new"] == "inactive"


def test_systemd_starts_the_daemon_of_the_package(facts: dict[str, str]) -> None:
    """With the configuration of the package and a secret it serves, as a user of its own."""
    assert facts["checked"] == facts["started"] == facts["answers"] == facts["doctor"] == "0"
    assert facts["runs_as"] == "tmd"


def test_an_upgrade_restarts_the_daemon(facts: dict[str, str]) -> None:
    assert facts["upgraded"] == facts["restarted"] == facts["answers_again"] == "0"


def test_removal_stops_the_daemon_and_keeps_what_an_operator_wrote(facts: dict[str, str]) -> None:
    assert facts["removed"] == "0"
    assert facts["then"] == "inactive"
    assert facts["kept"].split() == ["secret", "tmd.toml"]


def test_a_container_keeps_the_folder_of_a_daemon_that_restarts(facts: dict[str, str]) -> None:
    """With the drop-in of the documentation; without it the folder that it has mounted is gone."""
    assert facts["lost_folder"] == ""
    assert facts["answers_below"] == "0"
    assert facts["kept_folder"] == facts["has_folder"] != ""


def test_a_new_installation_finds_the_service_enabled(facts: dict[str, str]) -> None:
    """An upgrade of Debian removes the package. Installing it again prints what is left to do."""
    assert facts["again"] == "tmd: the service does not run: systemctl enable --now tmd"
    assert facts["still"] == "enabled"


def test_a_purge_leaves_nothing_but_the_secret(facts: dict[str, str]) -> None:
    """Python writes bytecode beside the modules, which dpkg does not know of."""
    assert facts["purged"] == "0"
    assert facts["left"].split() == ["/etc/tmd", "/etc/tmd/secret"]
