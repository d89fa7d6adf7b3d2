"""`cdc spark`: what a cluster is told to run, as text that is made of the definition alone."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import pipelines
from cdc.cluster.spark_submit_command import DELTA_PACKAGE
from cdc.config import load_definition
from pipelines.__main__ import _parser, _select_sinks
from tests.cli.command import Outcome, run

GOLDEN = Path(__file__).parent / "golden"
REFERENCES = {
    "SHOP_DSN": "postgresql://u:hidden@h/d",
    "S3_KEY_ID": "hidden",
    "S3_KEY": "hidden",
    "CATALOG_URL": "postgresql://c:hidden@h/c",
}
SHOP = """\
version: 1
name: shop_eu
source: {dsn: "${SHOP_DSN}"}
tables: [{match: shop.*}]
log:
  path: s3://lake/log
  storage: {region: eu-west-1, access_key_id: {env: S3_KEY_ID}, secret_access_key: {file: key}}
sinks:
  - {name: lake, type: delta, path: "/mnt/lake/tables/{schema}/{table}"}
  - {name: find, type: search, path: /mnt/lake/find}
spark:
  master: spark://head:7077
  checkpoint: /tmp/cdc
  conf: {spark.executor.memory: 4g, spark.hadoop.fs.s3a.secret.key: "${S3_KEY:-none}"}
catalog: {url: "${CATALOG_URL}"}
"""


@pytest.fixture(name="shop")
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in REFERENCES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "key").write_text("hidden")
    (tmp_path / "key").chmod(0o600)
    return written(tmp_path, SHOP)


def written(folder: Path, text: str) -> Path:
    (folder / "shop.yaml").write_text(text)
    return folder / "shop.yaml"


def in_buckets() -> str:
    """The definition with log and lake in buckets, without a local index and without a secret file."""
    text = SHOP.replace("/mnt/lake/tables/", "s3://tables/").replace("{file: key}", "{env: S3_KEY}")
    return "".join(line for line in text.splitlines(keepends=True) if "type: search" not in line)


def printed(capsys: pytest.CaptureFixture[str], *command: object) -> str:
    outcome = run(capsys, "spark", *command)
    assert (outcome.status, outcome.errors) == (0, "")
    assert "hidden" not in outcome.output
    return outcome.output


def refused(capsys: pytest.CaptureFixture[str], *command: object) -> Outcome:
    outcome = run(capsys, "spark", *command)
    assert (outcome.status, outcome.output) == (2, "")
    return outcome


def test_the_command_is_printed_as_a_shell_takes_it(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sink", "lake", "--trigger", "once")
    words = shlex.split(printed(capsys, "print", "-c", shop, *options, "--", "--deploy-mode", "client"))
    home = words[0].removeprefix("SPARK_HOME=")

    assert words[1:3] == [f"PYSPARK_PYTHON={sys.executable}", f"PYSPARK_DRIVER_PYTHON={sys.executable}"]
    assert words[3:8] == [f"{home}/bin/spark-submit", "--master", "spark://head:7077", "--name", "cdc-shop-eu"]
    assert words[8:10] == ["--packages", DELTA_PACKAGE]
    settings = ["--conf", "spark.executor.memory=4g", "--conf", "spark.log.level=WARN"]
    assert words[12:18] == [*settings, "--deploy-mode", "client"]
    job = Path(pipelines.__file__).parent / "submitted" / "job.py"
    assert words[18:] == [str(job), "apply", "--config", str(shop), "--sink", "lake", "--trigger", "once"]
    assert job.is_file()


GUIDE = Path(__file__).parents[2] / "deploy" / "guides" / "run-on-a-cluster.md"
COMMANDS = re.findall(r"^ *\$ cdc (spark .*?) *(?:#.*)?$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
"""The commands of the guide, with what a shell does with their output."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_guide_is_accepted(command: str, shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `submit` would run is printed: test_two_workers.py runs such a command."""
    written(shop.parent, in_buckets())
    words = shlex.split(re.split(r" [|>] ", command)[0])
    _, verb, *arguments = [str(shop) if word == "shop.yaml" else word for word in words]

    assert printed(capsys, "print" if verb == "submit" else verb, *arguments)


@pytest.mark.parametrize("command", ["submit", "print", "k8s", "databricks"])
def test_guide_and_help_say_alike_what_was_not_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(run(capsys, "spark", command, "--help").output.split())
    assert "YARN, Kubernetes and Databricks were not run." in shown
    assert "| YARN, Kubernetes, Databricks | not run." in GUIDE.read_text(encoding="utf-8")


def test_the_guide_has_commands_of_each_kind() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"submit", "print", "k8s", "databricks"}


def test_master_jars_and_the_executors_python_are_as_said(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shop.parent / "delta.jar").touch()
    written(shop.parent, SHOP.replace("checkpoint:", "delta_jars: [delta.jar]\n  checkpoint:"))
    options = ("--master", "yarn", "--python", "./env/bin/python")
    words = shlex.split(printed(capsys, "print", "-c", shop, *options))

    assert words[1] == "PYSPARK_PYTHON=./env/bin/python"
    assert words[4:6] == ["--master", "yarn"]
    assert words[8:10] == ["--jars", str(shop.parent / "delta.jar")]


def test_the_job_understands_what_the_command_says(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--sink", "find", "--trigger", "5s")
    words = shlex.split(printed(capsys, "print", "-c", shop, *options))
    asked = _parser().parse_args(words[words.index("apply") :])
    narrowed = _select_sinks(load_definition(asked.config), asked.sink, asked.trigger)

    assert ([sink.name for sink in narrowed.sinks], narrowed.spark.trigger) == (["find"], 5.0)


def test_a_verb_goes_on_as_it_was_written_whatever_stands_between_its_words(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("replay", "lake", "--from", "beginning", "--tables", "a.*", "--tables=b.*", "--into", "s3://lake/new")
    between = (*asked[:2], "-c", shop, *asked[2:6], "--master", "yarn", *asked[6:])
    words = shlex.split(printed(capsys, "print", *between, "--", "--queue", "night"))
    job = words.index("--queue") + 3

    assert words[4:8] == ["--master", "yarn", "--name", "cdc-shop-eu-replay-lake"]
    assert words[job - 3 : job - 1] == ["--queue", "night"]
    assert words[job:] == ["replay", "--config", str(shop), *asked[1:]]
    told = _parser().parse_args(words[job:])
    assert (told.sink, told.start, told.tables, told.into) == ("lake", "beginning", ["a.*", "b.*"], "s3://lake/new")


def test_a_compaction_is_told_in_the_words_of_the_log(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(printed(capsys, "print", "compact", "--all", "-c", shop))

    assert words[words.index("compact") :] == ["compact", "--config", str(shop), "--all"]
    assert _parser().parse_args(words[words.index("compact") :]).everything


def test_a_replay_is_a_job_of_its_own_that_ends(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-c", shop, "--claim", "lake=/mnt", "--into", "/mnt/new")
    definition, application = YAML(typ="safe").load_all(printed(capsys, "k8s", "replay", "lake", *options))

    # what it is told and its secrets are those of the apply process beside it
    assert definition["metadata"]["name"] == "cdc-shop-eu"
    assert application["metadata"]["name"] == "cdc-shop-eu-replay-lake"
    assert application["spec"]["arguments"][-3:] == ["lake", "--into", "/mnt/new"]
    assert application["spec"]["restartPolicy"] == {"type": "Never"}


def test_a_copy_has_its_own_option_and_needs_no_path_of_a_sink(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(printed(capsys, "print", "copy", "--connections", "8", "-c", shop))

    assert words[words.index("copy") :] == ["copy", "--config", str(shop), "--connections", "8"]
    assert _parser().parse_args(words[words.index("copy") :]).connections == 8
    _, application = YAML(typ="safe").load_all(printed(capsys, "k8s", "copy", "-c", shop))
    assert application["metadata"]["name"] == "cdc-shop-eu-copy"


def test_a_compaction_may_have_a_schedule_and_needs_the_log_alone(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(shop.parent, SHOP.replace("${CATALOG_URL}", "sqlite:////srv/c.db"))
    _, application = YAML(typ="safe").load_all(printed(capsys, "k8s", "compact", "-c", shop, "--schedule", "@daily"))

    assert (application["kind"], application["metadata"]["name"]) == (
        "ScheduledSparkApplication",
        "cdc-shop-eu-compact",
    )
    assert application["spec"]["template"]["arguments"] == ["compact", "--config", "/etc/cdc/shop.yaml"]


def test_the_bundle_of_another_verb_does_not_replace_that_of_apply(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(shop.parent, in_buckets())
    bundle = YAML(typ="safe").load(printed(capsys, "databricks", "compact", "--all", "-c", shop))
    (job,) = bundle["resources"]["jobs"].values()
    (task,) = job["tasks"]

    assert (bundle["bundle"]["name"], job["name"]) == ("cdc-shop-eu-compact", "cdc-shop-eu-compact")
    assert task["python_wheel_task"]["parameters"][-1] == "--all"
    assert "continuous" not in job


@pytest.mark.parametrize(
    ("golden", "command"),
    [
        ("spark_k8s.yaml", ("k8s", "--image", "registry/cdc:1", "--claim", "lake=/mnt/lake")),
        (
            "spark_k8s_once.yaml",
            ("k8s", "--claim", "lake=/mnt/lake", "--trigger", "once", "--schedule", "@every 10m", "--sink", "lake"),
        ),
    ],
)
def test_the_manifest_is_the_golden_one(
    shop: Path, capsys: pytest.CaptureFixture[str], golden: str, command: tuple[str, ...]
) -> None:
    assert printed(capsys, *command, "-c", shop) == (GOLDEN / golden).read_text(encoding="utf-8")


def test_a_pod_finds_what_the_definition_names(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shop.parent / "deep").write_text("hidden")
    (shop.parent / "deep").chmod(0o600)
    written(shop.parent, SHOP.replace("{env: S3_KEY_ID}", f"{{file: {shop.parent}/deep}}"))
    options = ("--claim", "l=/mnt", "--env", "AWS_REGION")
    definition, application = YAML(typ="safe").load_all(printed(capsys, "k8s", "-c", shop, *options))
    spec = application["spec"]

    assert definition["data"]["shop.yaml"] == shop.read_text()
    mounts = {mount["mountPath"]: mount for mount in spec["driver"]["volumeMounts"]}
    assert mounts[f"{shop.parent}/deep"] == {
        "name": "secrets",
        "mountPath": f"{shop.parent}/deep",
        "subPath": "deep",
    }
    assert {volume["name"] for volume in spec["volumes"]} == {mount["name"] for mount in mounts.values()}
    assert sorted(spec["driver"]["envSecretKeyRefs"]) == ["AWS_REGION", "CATALOG_URL", "SHOP_DSN"]


def test_the_bundle_is_the_golden_one(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(shop.parent, in_buckets())

    assert printed(capsys, "databricks", "-c", shop) == (GOLDEN / "spark_databricks.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "change", "says"),
    [
        (("print", "--sink", "lak"), ("", ""), "unknown sink 'lak': expected one of lake, find"),
        (("print", "--trigger", "5"), ("", ""), "trigger '5': expected a duration"),
        (("print", "--trigr", "5s"), ("", ""), "no such option: --trigr"),
        (("print", "rewind", "lake"), ("", ""), "unknown verb 'rewind': expected one of apply, replay, compact, copy"),
        (("print", "apply", "lake"), ("", ""), "got unexpected extra argument(s) (lake)"),
        (("print", "replay"), ("", ""), "missing argument 'sink'"),
        (("print", "replay", "lak"), ("", ""), "unknown sink 'lak': expected one of lake, find"),
        (("print", "replay", "lake", "--form", "beginning"), ("", ""), "no such option: --form"),
        (("print", "replay", "lake", "--from", "yesterday"), ("", ""), "malformed --from 'yesterday'"),
        (("print", "replay", "lake", "--to", "1/2/3"), ("", ""), "malformed lsn"),
        (("print", "replay", "lake", "--trigger", "once"), ("", ""), "are options of apply, not of replay"),
        (("print", "compact", "lake"), ("", ""), "got unexpected extra argument(s) (lake)"),
        (("print", "copy", "--connections", "0"), ("", ""), "should be greater than or equal to 1"),
        (
            ("k8s", "--claim", "l=/mnt", "compact", "--", "--queue", "x"),
            ("", ""),
            "this command takes no arguments after --",
        ),
        (("k8s", "--claim", "l=/mnt", "replay", "lake", "--into", "new"), ("", ""), "--into is a local directory"),
        (("k8s",), ("", ""), "the path of sink 'lake' is a local directory"),
        (("k8s", "--claim", "lake"), ("", ""), "--claim 'lake' is malformed: expected NAME=/PATH"),
        (("k8s", "--claim", "l=/mnt", "--schedule", "@hourly"), ("", ""), "a scheduled run must end"),
        (("k8s", "--claim", "l=/mnt"), ("${CATALOG_URL}", "sqlite:////srv/c.db"), "catalog.url is a local file"),
        (("k8s", "--claim", "l=/mnt"), ("${CATALOG_URL}", "postgresql://c:x@h/c"), "catalog.url contains a password"),
        (
            ("k8s", "--claim", "l=/mnt"),
            ("${SHOP_DSN}", "postgresql://u:x@${S3_KEY}/d"),
            "source.dsn contains a password",
        ),
        (("k8s", "--claim", "l=/mnt"), ("${S3_KEY:-none}", "plain"), "'spark.hadoop.fs.s3a.secret.key' contains a"),
        (("databricks",), ("/mnt/", "/Volumes/v/"), "the path of sink 'lake' is a local directory: expected a path in"),
        (("databricks", "compact"), ("", ""), "secret file 'key' exists only on this machine"),
    ],
)
def test_what_cannot_be_carried_out_elsewhere_is_refused(
    shop: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], change: tuple[str, str], says: str
) -> None:
    written(shop.parent, SHOP.replace(*change) if change[0] else SHOP)

    assert says in refused(capsys, *command, "-c", shop).errors
