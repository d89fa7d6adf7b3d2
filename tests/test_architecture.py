"""Architecture: who may import whom, how large functions may be, and how they may be called."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import get_args

import pytest

from cdc.config.sinks import DefinedSink
from cdc.delivery.destinations import KINDS as DESTINATIONS
from pipelines.sink_kinds import KINDS
from tests.fixtures.rules import of_each
from tests.source_tree import OWN, PACKAGES, ROOT, Choices, Function, Module, choices_in, imports_any, modules

TOP_LEVEL = {
    ".ci", ".github", ".gitignore", "LICENSE", "README.md", "cdc", "config", "deploy", "migrations", "pipelines",
    "pyproject.toml", "tests",
}  # fmt: skip
GENERATED = {".git", "uv.lock"}
PURE = (
    "cdc.lsn", "cdc.position", "cdc.table", "cdc.log_row", "cdc.logical_message", "cdc.errors", "cdc.metrics",
    "cdc.target_names", "cdc.array_literal", "cdc.pgoutput", "cdc.log.disk_format", "cdc.log.file_selection",
    "pipelines.folding.fences_and_statistics", "pipelines.folding.fold", "pipelines.folding.image_overlay",
    "pipelines.types",
)  # fmt: skip
# the policy for text that is not UTF-8 is an enumeration of a definition; the compiler of kernels caches them on disk;
# a pool is memory like any other
PURE_MAY_ALSO = ("cdc.config.source", "cdc.cached_njit", "cdc.array_pool")
INPUT_OUTPUT = {
    "socket",
    "subprocess",
    "requests",
    "urllib.request",
    "psycopg",
    "sqlalchemy",
    "deltalake",
    "time",
    "asyncio",
    "threading",
}
LAYERS = (
    ("cdc", "the vocabulary that every package may use"),
    ("cdc.delta_protocol", "the log of a Delta table"),
    ("cdc.log", "the change log"),
    ("cdc.log.audit", "whether the log is what was written"),
    ("cdc.config", "definition files"),
    ("cdc.view_sql", "the SQL of views"),
    ("cdc.pgoutput", "wire format to Arrow rows"),
    ("cdc.catalog", "commands, leases and visible state"),
    ("cdc.postgres", "the source server"),
    ("cdc.targets", "read access to targets"),
    ("cdc.targets.search_server", "documents of a search server"),
    ("cdc.snapshot", "copies of tables beside the stream"),
    ("cdc.capture", "the connector process"),
    ("cdc.delivery.formats", "changes as events"),
    ("cdc.delivery.destinations", "brokers, files and sockets"),
    ("cdc.delivery", "the delivery process"),
    ("cdc.cluster", "what a Spark cluster is given to run"),
    ("pipelines.types", "Postgres types to Arrow types"),
    ("pipelines.folding", "from changes to rows"),
    ("pipelines.runtime", "what surrounds the sinks of an apply process"),
    ("pipelines.compaction", "cold segments of the log"),
    ("pipelines.source", "the Spark data source"),
    ("pipelines.transform", "rules of a definition"),
    ("pipelines.sinks", "the contract of a sink"),
    ("pipelines.sinks.delta.indexed", "index and live files of the indexed writer"),
    ("pipelines.sinks.delta", "Delta targets"),
    ("pipelines.sinks.search", "search targets"),
    ("pipelines.sinks.search_server", "search targets on a server"),
    ("pipelines.dead_letters", "rows that a target refuses"),
    ("pipelines.views", "streams that SQL derives from tables"),
    ("pipelines", "the apply process"),
    ("pipelines.replaying", "a target from the log alone"),
    ("pipelines.verification", "target = source"),
    ("pipelines.submitted", "entry points of a cluster"),
    ("cdc.service", "supervisor and status"),
    ("cdc.service.page", "the page"),
    ("cdc.service.api", "the API"),
    ("cdc.demo", "the demo"),
    ("cdc.cli", "the commands"),
)
"""Packages with what they are for. Each imports only packages above it."""
_SPARK = frozenset(package for package, _ in LAYERS if package.startswith("pipelines"))
INDEPENDENT = {
    **{package: _SPARK for package, _ in LAYERS if package.startswith("cdc")},
    "pipelines.sinks.search": frozenset({"pipelines.sinks.delta"}),
}
"""What a package may not import although it is above: cdc imports no Spark job, and no sink imports another."""
COMMAND_TOP = ("cdc.cli", "cdc.errors", "cdc.command_output", "cdc.DEFAULT_CONFIG")
"""What a module of a command may import before its command runs: each import costs every command its time."""
OF_SINKS = ("cdc.config.sinks", "cdc.targets.sink_kinds", "pipelines.sink_kinds")
"""The tables of the kinds of sinks: their definitions, how they are read, and how they are written."""
KINDS_OF_SINKS = (
    "cdc.config.delta_sink", "cdc.config.search_sink", "cdc.targets.delta_reading", "cdc.targets.search_reading",
    "cdc.targets.search_server", "pipelines.sinks.delta", "pipelines.sinks.search", "pipelines.sinks.search_server",
)  # fmt: skip
"""Modules and packages of single kinds of sinks."""
OF_DESTINATIONS = ("cdc.config.destinations", "cdc.delivery.destinations")
"""The definitions of the destinations of deliveries, and the destinations with their table."""
COMMIT_NAME = re.compile(r":020d\}\.json")
"""The name of a commit file of Delta: twenty digits."""
BODY_LINES = 60
PARAMETERS = 5
KERNELS = {"cdc.pgoutput.columnar_decoder", "cdc.pgoutput.copy_kernel", "cdc.pgoutput.kernel"}
"""Compiled by numba: flat functions of arrays."""
FORBIDDEN_MODULES = {"utils", "helpers", "common", "misc", "base", "core", "manager", "handler"}
FORBIDDEN_SUFFIXES = ("Manager", "Helper", "Util", "Handler", "Processor", "Service", "Impl")
FORBIDDEN_NAMES = {"data", "df1", "tmp", "res", "thing"}
GENERIC_NAMES = {"found", "one", "known", "wanted", "more", "this"}
"""Names of variables that fit everything, and are used only outside of NAMED_BY_THE_DOMAIN."""
NAMED_BY_THE_DOMAIN = {
    "cdc.capture", "cdc.pgoutput", "cdc.service.page", "pipelines", "pipelines.runtime", "pipelines.sinks",
    "pipelines.submitted",
}  # fmt: skip
"""Packages whose variables have the names of what they hold."""
# the contract that a class of the standard library or a framework lays down has their words
FOREIGN_BASES = {"BaseHTTPRequestHandler", "StreamRequestHandler"}
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#|mailto:)([^)#\s]+)[^)]*\)")

TO_DRIVER = re.compile(r"\.(?:collect|toArrow|toLocalIterator|toPandas)\(")
"""Calls that bring what Spark's executors have to the driver."""
BROUGHT_TO_DRIVER = {
    "pipelines/compaction/run_writer.py": "names, sizes and statistics of files",
    "pipelines/folding/executor_fold.py": "control rows, MAX_MOVES keys, and numbers of rows by part and table",
    "pipelines/folding/folded_parts.py": "rows whose number or bytes the caller limits, or one partition at a time",
    "pipelines/folding/spark_fold.py": "one partition at a time, for a replay",
    "pipelines/range_folder.py": "small tables, and tables that the sink takes only on the driver",
    "pipelines/replaying/latest_rows.py": "names, sizes and statistics of files",
    "pipelines/sinks/delta/executor_files.py": "names, sizes and statistics of files",
    "pipelines/sinks/delta/executor_key_search.py": "an entry for each file with old rows",
    "pipelines/sinks/delta/executor_refusals.py": "positions of as many rows as may be parked",
    "pipelines/sinks/delta/latest_state_strategy.py": "a replay's rows of a target that Spark cannot write",
    "pipelines/sinks/delta/merge_source.py": "a replay's partial images",
    "pipelines/sinks/delta/shared_directory.py": "names of probes",
    "pipelines/sinks/delta/spark_target.py": "base rows in a target that only Spark can read",
    "pipelines/sinks/search_server/executor_writer.py": "one error of each task",
    "pipelines/submitted/copy_chunks.py": "names, sizes and checksums of files",
    "pipelines/transform/expressions.py": "rows that the driver has sent to be computed",
    "pipelines/views/large_build.py": "names of files",
    "pipelines/views/view_columns.py": "rows of a view, keys of a step: ComputationLimits says how many",
}
"""What these calls bring, by module: no other module moves rows from the executors to the driver."""


def of_every(*folders: str) -> Callable[[Callable[[Module], None]], Callable[[], None]]:
    """Make a rule about one module a test of all below the folders, which names every module that breaks it."""
    return of_each(lambda: modules(*(folders or OWN)), lambda module: module.place)


def below(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@of_every("cdc")
def test_cdc_imports_neither_pipelines_nor_spark(module: Module) -> None:
    assert imports_any(module, "pipelines", "pyspark", "delta") == set()


@of_every(*PACKAGES)
def test_only_the_postgres_package_imports_psycopg(module: Module) -> None:
    if not below(module.name, ["cdc.postgres"]):
        assert imports_any(module, "psycopg", "psycopg_binary") == set()


@of_every(*PACKAGES)
def test_only_catalog_and_migrations_import_sqlalchemy(module: Module) -> None:
    if not below(module.name, ["cdc.catalog", "migrations"]):
        assert imports_any(module, "sqlalchemy", "alembic") == set()


@of_every(*PACKAGES)
def test_only_log_targets_and_sinks_import_deltalake(module: Module) -> None:
    if not below(module.name, ["cdc.delta_protocol", "cdc.log", "cdc.targets", "pipelines.sinks"]):
        assert imports_any(module, "deltalake") == set()


@of_every(*PACKAGES)
def test_one_module_imports_the_client_of_object_stores(module: Module) -> None:
    if module.name != "cdc.bucket_files":
        assert imports_any(module, "obstore") == set()


@of_every("cdc")
def test_only_the_service_imports_the_web_framework(module: Module) -> None:
    if not below(module.name, ["cdc.service", "cdc.cli"]):
        assert imports_any(module, "fastapi", "starlette", "uvicorn") == set()


@of_every("cdc", "pipelines")
def test_only_the_page_imports_the_template_engine(module: Module) -> None:
    if not below(module.name, ["cdc.service.page"]):
        assert imports_any(module, "jinja2", "markupsafe") == set()


@of_every("cdc", "pipelines")
def test_packages_import_only_what_is_above_them_in_the_table(module: Module) -> None:
    if module.path.name == "__main__.py":
        return  # a process begins here
    mine, packages = _package(module), [package for package, _ in LAYERS]
    allowed = {*packages[: packages.index(mine) + 1]} - INDEPENDENT.get(mine, frozenset())
    needed = _needed(module)
    found = {package for name in needed if (package := _packages().get(name))}

    assert {name for name in found if name not in allowed and name != module.name.partition(".")[0]} == set()


def test_every_package_is_in_the_table() -> None:
    assert {_package(module) for module in modules("cdc", "pipelines")} == {package for package, _ in LAYERS}


def _package(module: Module) -> str:
    """The package that a module is in; a package is in itself."""
    return module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]


@cache
def _packages() -> dict[str, str]:
    """The package of every module."""
    return {module.name: _package(module) for module in modules(*PACKAGES)}


@of_every(*PACKAGES)
def test_pure_modules_import_no_seam(module: Module) -> None:
    if not below(module.name, PURE):
        return
    own = module.imports & _packages().keys()
    allowed = (*PURE, *PURE_MAY_ALSO)

    assert {
        name for name in own if not below(name, allowed) and name not in {"cdc", "cdc.log", "pipelines", "cdc.config"}
    } == set()
    assert imports_any(module, *INPUT_OUTPUT - ({"threading"} if module.name == "cdc.metrics" else set())) == set()


def test_our_modules_import_each_other_without_cycles() -> None:
    known = {m.name: m for m in modules(*PACKAGES)}
    graph = {name: {i for i in _needed(m) if i in known and i != name} for name, m in known.items()}
    try:
        order = tuple(TopologicalSorter(graph).static_order())
    except CycleError as cycle:
        pytest.fail(f"import cycle: {' → '.join(cycle.args[1])}")

    assert len(order) == len(known)


@cache
def _needed(module: Module) -> frozenset[str]:
    """What it imports, a package only where the name asked for is no module of it."""
    parts = [name.split(".") for name in module.imports & _packages().keys()]
    return module.imports - {".".join(names[:number]) for names in parts for number in range(1, len(names))}


@of_every()
def test_own_modules_are_imported_at_the_top_except_by_commands(module: Module) -> None:
    if not below(module.name, ["cdc.cli", "cdc.__main__", "pipelines.__main__"]):
        assert {name for name in module.late_imports if name.partition(".")[0] in OWN} == set()


@of_every("cdc/cli")
def test_commands_import_nothing_heavy_at_the_top(module: Module) -> None:
    own = {name for name in module.top_imports if name.partition(".")[0] in PACKAGES}

    assert {name for name in own if not below(name, COMMAND_TOP) and name != "cdc"} == set()
    assert {name.partition(".")[0] for name in module.top_imports} & {
        "pyarrow",
        "numba",
        "deltalake",
        "tantivy",
        "fastapi",
        "rich",
        "pydantic",
    } == set()


@of_every()
def test_functions_stay_within_their_lines(module: Module) -> None:
    kernel = module.name in KERNELS
    long = {function.name for function in module.functions if function.body_lines > BODY_LINES}

    assert kernel or long == set()


def test_rows_come_from_executors_to_the_driver_only_where_they_are_few() -> None:
    calling = {module.place for module in modules("pipelines") if TO_DRIVER.search(module.text)}

    assert calling == {*BROUGHT_TO_DRIVER}


@of_every(*PACKAGES)
def test_functions_take_at_most_five_parameters(module: Module) -> None:
    if module.place.startswith("cdc/cli/") or module.name in KERNELS:
        return  # a command's parameters are its options; a compiled kernel's are its arrays
    wide = {function.name: n for function in module.functions if (n := _parameters(function)) > PARAMETERS}

    assert wide == {}


def _parameters(function: Function) -> int:
    return 0 if function.is_route else len([name for name in function.parameters if name not in {"self", "cls"}])


@of_every()
def test_modules_and_classes_are_named_by_what_they_hold(module: Module) -> None:
    # a word alone is a noun of the domain, as the `service` of a definition; at the end of another it says nothing
    ours = [
        one.name for one in module.classes if one.name not in FORBIDDEN_SUFFIXES and FOREIGN_BASES.isdisjoint(one.bases)
    ]

    assert not FORBIDDEN_MODULES & set(module.name.split("."))
    assert [name for name in ours if name.endswith(FORBIDDEN_SUFFIXES)] == []


@of_every(*PACKAGES)
def test_only_tests_and_libraries_import_pandas_and_duckdb(module: Module) -> None:
    assert imports_any(module, "pandas", "duckdb", "polars") == set()


def test_a_public_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for module in modules("cdc", "pipelines"):
        for one in module.classes:
            if one.is_public:
                found.setdefault(one.name, []).append(module.name)

    assert {name: places for name, places in found.items() if len(places) > 1} == {}


@of_every()
def test_variables_say_what_they_hold(module: Module) -> None:
    generic = GENERIC_NAMES if module.name.rpartition(".")[0] in NAMED_BY_THE_DOMAIN else set()

    assert module.stored & (FORBIDDEN_NAMES | generic) == set()


@of_every(*PACKAGES)
def test_modules_begin_with_one_sentence_of_what_they_hold(module: Module) -> None:
    first = module.docstring.split("\n\n")[0]

    assert not module.is_empty, module.place
    assert len(first) > 3, "the module needs a docstring"
    assert module.text.startswith(('"""', 'r"""'))


@of_every()
def test_nothing_is_left_for_later(module: Module) -> None:
    later = re.compile(r"#.*\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")

    assert "NotImplementedError" not in module.names
    assert later.search(module.text) is None


@of_every("tests")
def test_tests_use_no_mocks_and_do_not_sleep(module: Module) -> None:
    assert imports_any(module, "unittest.mock", "mock", "pytest_mock") == set()
    assert {"Mock", "MagicMock"} & module.names == set()
    assert {"monkeypatch.setattr", "mock.patch"} & module.attributes == set()
    if not module.place.startswith("tests/benchmarks/"):  # a benchmark keeps a pace, which is no waiting for a signal
        assert {"time.sleep", "asyncio.sleep"} & (module.attributes | module.imports) == set()


def test_exactly_one_module_makes_a_delta_commit_file() -> None:
    making = {module.name for module in modules("cdc", "pipelines") if "encode_commit" in module.names}
    naming = {module.name for module in modules("cdc", "pipelines") if COMMIT_NAME.search(module.text)}

    assert making == naming == {"cdc.delta_protocol.commits"}


@of_every("cdc", "pipelines")
def test_only_the_tables_of_kinds_choose_by_the_kind_of_a_sink(module: Module) -> None:
    if not below(module.name, (*OF_SINKS, *KINDS_OF_SINKS)):
        assert _chosen(module.choices, _classes(*OF_SINKS, *KINDS_OF_SINKS), _names_of_sinks()) == set()


@of_every("cdc", "pipelines")
def test_only_the_tables_of_destinations_choose_by_the_type_of_a_delivery(module: Module) -> None:
    if not below(module.name, OF_DESTINATIONS):
        assert _chosen(module.choices, _classes(*OF_DESTINATIONS), frozenset(DESTINATIONS)) == set()


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(sink, DeltaSinkDefinition)",
        "isinstance(sink, config.SearchSinkDefinition | None)",
        "issubclass(kind, (str, DeltaSink))",
        "type(sink) is SearchServerSink",
        "match sink:\n    case DeltaSinkDefinition(name=name): pass",
        "{DeltaSinkDefinition: 1, str: 2}",
        "sink.type == 'delta'",
        "'tantivy' != definition.engine",
        "sink.kind in {'search', 'search_server'}",
        "RATES = {'delta': 200_000, 'search': 8_000}",
    ],
)
def test_a_choice_by_the_kind_of_a_sink_is_found(text: str) -> None:
    assert _chosen(choices_in(text), _classes(*OF_SINKS, *KINDS_OF_SINKS), _names_of_sinks()) != set()


@pytest.mark.parametrize("text", ["isinstance(sink, ParkingSink)", "{'delta': 1, 'log': 2}", "sink.type", "'delta'"])
def test_what_is_no_choice_by_kind_is_not_found(text: str) -> None:
    assert _chosen(choices_in(text), _classes(*OF_SINKS, *KINDS_OF_SINKS), _names_of_sinks()) == set()


def _chosen(choices: Choices, classes: frozenset[str], names: frozenset[str]) -> set[str]:
    """The classes and names of kinds between which a module chooses; a mapping is a choice if it has no other keys."""
    mapped = [keys for keys in choices.mappings if len(keys) > 1 and keys <= names]
    return {*(choices.classes & classes), *(choices.texts & names), *chain(*mapped)}


@cache
def _classes(*packages: str) -> frozenset[str]:
    """The classes that the modules of some packages define, but for those whose members are values."""
    return frozenset(
        one.name
        for module in modules("cdc", "pipelines")
        if below(module.name, packages)
        for one in module.classes
        if {"Protocol", "StrEnum", "Enum"}.isdisjoint(one.bases)
    )


@cache
def _names_of_sinks() -> frozenset[str]:
    """The names of the kinds of sinks, and of the engines of each."""
    fields = [model.model_fields for model in get_args(get_args(DefinedSink)[0])]
    engines = [get_args(keys["engine"].annotation) for keys in fields if "engine" in keys]
    return frozenset({*KINDS, *chain(*engines)})


def test_the_top_level_holds_what_it_should() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    found = {line.strip('"').partition("/")[0] for line in listed if (ROOT / line).exists()} or {
        p.name for p in ROOT.iterdir()
    }

    assert found - GENERATED - TOP_LEVEL == set()


def test_links_of_pages_lead_to_files() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(page for top in ROOT.iterdir() if top.name in TOP_LEVEL for page in top.rglob("*.md")),
    ]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]

    assert len(pages) > 10
    assert broken == []


def test_the_tests_of_a_module_are_where_its_path_says() -> None:
    missing = []
    for module in modules("cdc", "pipelines"):
        if module.path.name in {"__init__.py", "__main__.py"}:
            continue
        folders = module.path.relative_to(ROOT).with_suffix("").parts
        mirrored = ROOT.joinpath("tests", *(folders[1:] if folders[0] == "cdc" else folders))
        if not (mirrored.is_dir() or mirrored.with_name(f"test_{mirrored.name}.py").exists()):
            missing.append(module.place)

    assert missing == []


def test_tests_named_by_the_readme_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "README.md").read_text(encoding="utf-8"))
    missing = [
        f"{path}::{test}" for path, test in named
        if not (ROOT / path).exists() or (test and f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8"))
    ]  # fmt: skip

    assert named
    assert missing == []
