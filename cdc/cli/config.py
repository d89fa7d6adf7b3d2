"""`cdc config`: print a definition with its defaults, or the JSON schema of definitions."""

from __future__ import annotations

import json as encoder
from pathlib import Path
from typing import Annotated, Any

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import echo_source, emit
from cdc.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command group `config` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="Print a definition, or the JSON schema of definitions.", rich_markup_mode=None
    )
    group.command()(show)
    group.command()(schema)
    app.add_typer(group, name="config")


def show(
    config: ConfigOption = DEFAULT_CONFIG,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Also print the default values; print each secret as its reference.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a definition and print it as written, or with defaults (--resolved); never print secret values."""
    from cdc.config import check_definition, load_definition, printable_definition

    definition, written = load_definition(config), check_definition(config).written
    values = printable_definition(definition, written) if resolved else _plain(written)
    if json:
        emit("config show", json=True, summary=f"definition {definition.name!r}", result=values)
    else:
        echo_source(_yaml(values), end="")


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the schema to this file [default: standard output].")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the JSON schema of definitions, which editors use to complete and check them."""
    from cdc.config import Definition

    values = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Definition.model_json_schema()}
    text = encoder.dumps(values, indent=2, ensure_ascii=False) + "\n"
    if output is not None:
        _write(output, text)
        emit("config schema", json=json, summary=f"wrote {output}", result={"path": str(output)})
    elif json:
        emit("config schema", json=True, summary="printed the JSON schema of definitions", result=values)
    else:
        echo_source(text, end="")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the schema: {str(path)!r} is not a writable file", remedy="choose another file for --output"
        ) from error


def _plain(values: Any) -> Any:
    """Return the values as the definition file contains them: a variable such as `${NAME}` is not replaced."""
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_plain(value) for value in values]
    return getattr(values, "written", values)


def _yaml(values: Any) -> str:
    import io

    from ruamel.yaml import YAML

    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = True
    yaml.width = 120
    yaml.representer.add_representer(str, _represent_text)
    yaml.dump(values, stream)
    return stream.getvalue()


def _represent_text(representer: Any, text: str) -> Any:
    """Print a text of several lines, such as SQL, with its lines."""
    style = "|" if "\n" in text else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)
