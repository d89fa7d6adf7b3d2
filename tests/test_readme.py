"""The documents: their commands are executed, their links and file names lead somewhere, and they stay short.

Two things are put in place of what a workstation has: `sudo` runs the command, as the superuser's socket, and
`systemctl restart postgresql` restarts the test's server.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.config import load_definition
from cdc.errors import ExitCode
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

ROOT = Path(__file__).resolve().parent.parent
HBA = """\
local all         all              trust
host  all         all 127.0.0.1/32 scram-sha-256
host  replication all 127.0.0.1/32 scram-sha-256
"""
"""As Debian ships it, but for the superuser's own line, which is `peer` there."""
RESTART = "sudo systemctl restart postgresql\n"


def blocks(file: str, heading: str) -> list[str]:
    """The shell blocks of a section."""
    section = (ROOT / file).read_text(encoding="utf-8").split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^( *)```sh\n(.*?)^ *```", section, re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


TOP = [path for path in ROOT.iterdir() if path.name not in {".git", ".pytest_cache", ".venv"}]
PAGES = sorted(
    page.relative_to(ROOT).as_posix() for path in TOP for page in (path.rglob("*.md") if path.is_dir() else [path])
    if page.suffix == ".md"
)  # fmt: skip
READMES = [page for page in PAGES if page.endswith("README.md")]


@pytest.mark.parametrize("page", PAGES)
def test_links_into_a_page_lead_to_a_heading(page: str) -> None:
    here = ROOT / page
    found = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", here.read_text(encoding="utf-8"))
    wanted = [((here.parent / file).resolve() if file else here, anchor) for file, anchor in found]
    assert [anchor for target, anchor in wanted if anchor not in anchors(target)] == []


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", READMES)
def test_modules_named_by_a_readme_exist(page: str) -> None:
    files = [
        f"/{file.relative_to(ROOT).as_posix()}"
        for top in ("cdc", "pipelines", "tests")
        for file in (ROOT / top).rglob("*.py")
    ]
    # FAMILY and NAME stand for what a contributor chooses
    named = re.findall(r"`((?![^`]*(?:FAMILY|NAME))[\w/]+\.py)(?:::\w+)?`", (ROOT / page).read_text(encoding="utf-8"))
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


@pytest.fixture(name="server")
def _server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server with no setting but those of the distribution."""
    server = EmbeddedPostgres(tmp_path / "pg", tcp=True)
    server._settings = {}
    with server:
        run_sql(server.dsn(), "CREATE DATABASE app")
        run_sql(server.dsn("app"), "CREATE TABLE orders (id int PRIMARY KEY, note text)")
        run_sql(
            server.dsn("app"),
            "INSERT INTO orders SELECT n, 'note ' || n FROM generate_series(1, 3) n",
            "CREATE TABLE notes (text text)",
            "INSERT INTO notes VALUES ('a')",
            "CREATE ROLE owner",
            "GRANT CREATE ON SCHEMA public TO owner",
            "ALTER TABLE notes OWNER TO owner",
        )
        (server.data_directory / "pg_hba.conf").write_text(HBA)
        server.stop()
        server.start()
        yield server


WRITE = """sudo -u postgres psql -d app -v ON_ERROR_STOP=1 -c "UPDATE notes SET text = 'b'" """
"""What an application does all the time, to a table without a key."""


class Shell:
    """A shell in a directory, with the commands that a workstation has."""

    def __init__(self, directory: Path, server: EmbeddedPostgres) -> None:
        self.directory = directory
        programs = directory / "bin"
        programs.mkdir(parents=True)
        socket = f"PGHOST={shlex.quote(str(server.socket_directory))} PGUSER=postgres"
        self._command(programs / "sudo", f'shift 2; exec env {socket} "$@"')
        self._command(programs / "uv", f'shift 2; exec {shlex.quote(sys.executable)} -m cdc "$@"')
        path = f"{programs}:{server.programs}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PGPORT": str(server.port), "PYTHONPATH": str(ROOT)}

    @staticmethod
    def _command(file: Path, script: str) -> None:
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """A block to its end."""
        command = ["bash", "-euc", script]
        return subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=240, check=False
        )

    @contextmanager
    def running(self, script: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command in another terminal, ended by ^C."""
        with (self.directory / "run.out").open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {script}"], cwd=self.directory, env=self.environment, stdout=output, stderr=output
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def done(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


GUIDE = "deploy/guides/own-postgres.md"


def follow_to_the_publication(shell: Shell, server: EmbeddedPostgres) -> None:
    """The steps of the guide until the source can be captured; after each, applications can still write."""
    settings, role, definition, statements, check, *_ = blocks(GUIDE, "## Steps")
    assert settings.endswith(RESTART)
    done(shell.run(settings.removesuffix(RESTART)))
    server.stop()
    server.start()
    done(shell.run(role))
    assert (shell.directory / "app.dsn").stat().st_mode & 0o077 == 0
    done(shell.run(WRITE))
    missing = shell.run(definition)
    assert missing.returncode == ExitCode.ENVIRONMENT
    assert "public.notes: has no primary key: once the table is published" in missing.stdout
    done(shell.run(WRITE))
    done(shell.run(statements))
    done(shell.run(WRITE))
    assert "✓ the source can be captured" in done(shell.run(check))


def test_the_guide_for_an_own_postgres_makes_no_write_of_an_application_fail(
    tmp_path: Path, server: EmbeddedPostgres
) -> None:
    shell = Shell(tmp_path / "home", server)
    follow_to_the_publication(shell, server)
    create = '-c "SET ROLE owner" -c "CREATE TABLE later (id int PRIMARY KEY)"'
    done(shell.run(f"sudo -u postgres psql -d app -v ON_ERROR_STOP=1 {create}"))
    assert done(shell.run('psql "$(cat app.dsn)" -Atc "SELECT count(*) FROM later"')) == "0\n"


@pytest.mark.slow
def test_a_new_user_with_an_own_postgres_follows_the_guide_to_the_rows(
    tmp_path: Path, server: EmbeddedPostgres
) -> None:
    *_, start, look, undo = blocks(GUIDE, "## Steps")
    shell = Shell(tmp_path / "home", server)
    follow_to_the_publication(shell, server)
    status, query = look.splitlines()
    with shell.running(start) as process:
        printed = (shell.directory / "run.out").read_text
        until(lambda: "3 rows" in shell.run(query).stdout, lambda: printed() + shell.run(query).stderr, seconds=240)
        done(shell.run("""sudo -u postgres psql -d app -c "INSERT INTO orders VALUES (4, 'four')" """))
        until(lambda: "four" in shell.run(query).stdout, printed, seconds=60)
        assert "app is running" in done(shell.run(status))
        assert process.poll() is None
    done(shell.run(undo))


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "deploy" / "systemd" / "cdc@.service")
    return parser["Service"]


def test_the_steps_of_deploy_make_what_the_unit_needs() -> None:
    service, steps = unit(), "".join(blocks("deploy/README.md", "## One machine"))
    words = [shlex.split(line) for line in steps.splitlines()]
    account = next(line for line in words if line[0] == "useradd")
    state = f"/var/lib/{service['StateDirectory']}"
    assert account[-1] == service["User"] == service["Group"]
    assert account[account.index("--home-dir") + 1] == state == service["WorkingDirectory"]
    assert [
        "install",
        "-d",
        "-o",
        service["User"],
        "-g",
        service["Group"],
        "-m",
        service["StateDirectoryMode"],
        state,
    ] in words
    # /usr/bin/env looks where systemd has it look: its default PATH begins with /usr/local
    link = next(line for line in words if line[0] == "ln")
    assert link[-1] in {"/usr/local/bin/cdc", "/usr/local/sbin/cdc"}
    assert all(service[key].startswith("/usr/bin/env cdc ") for key in ("ExecStart", "ExecStartPre"))
    made = {line[-1] for line in words if line[0] == "install"}
    assert made >= {
        service["ExecStart"].split()[-1].replace("%i", "shop"),
        service["EnvironmentFile"].lstrip("-").replace("%i", "shop"),
    }
    assert ["systemctl", "enable", "--now", "cdc@shop"] in words


def test_the_steps_of_deploy_copy_files_that_there_are() -> None:
    steps = "".join(blocks("deploy/README.md", "## One machine"))
    named = re.findall(r"(?:config|deploy)/[\w@./]+", steps)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert 'cdc = "cdc.__main__:main"' in (ROOT / "pyproject.toml").read_text()


def test_the_example_of_deploy_keeps_to_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DSN", "postgresql://cdc@db/shop")
    monkeypatch.setenv("CDC_HOME", "/var/lib/cdc/shop")
    definition = load_definition(ROOT / "config" / "shop.yaml")
    places = [definition.log.path, definition.spark.checkpoint, *(sink.path for sink in definition.sinks)]
    assert [place for place in places if not place.startswith("/var/lib/cdc/")] == []
    assert definition.catalog.url.startswith("sqlite:////var/lib/cdc/")
