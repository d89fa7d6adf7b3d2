"""`cdc slots`: list the replication slots and the WAL that they retain; recover, drop or adopt the pipeline's slot."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, YesOption, audit, confirm
from cdc.command_output import LineMark, echo, emit, line
from cdc.errors import CdcError, ConfigError, ExitCode

if TYPE_CHECKING:
    from cdc.service.slot_risk import SourceObservation

SOURCE_ANSWERS = 5.0
"""Maximum seconds to wait for the source's answer to the query about the slot."""

EpochOption = Annotated[
    bool,
    typer.Option(
        "--new-epoch",
        help="Create a new slot and publication, and copy every table again; the log continues in a new epoch.",
    ),
]
PromotionOption = Annotated[
    bool,
    typer.Option(
        "--accept-promotion",
        help="Continue from a promoted or restored server that does not have the log's last transactions; their rows "
        "or tables are read again.",
    ),
]
SkipOption = Annotated[
    str | None,
    typer.Option(
        "--skip-to", metavar="LSN", help="Move the slot to this LSN, past a transaction that cannot be decoded."
    ),
]
ResyncOption = Annotated[
    list[str] | None,
    typer.Option(
        "--resync",
        metavar="TABLE",
        help="Mark the tables that match this glob as needs_resync; required with --skip-to; may be repeated.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command group `slots` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="List, recover, drop or adopt replication slots.", rich_markup_mode=None
    )
    group.command()(ls)
    group.command()(recover)
    group.command()(drop)
    group.command()(adopt)
    app.add_typer(group, name="slots")


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List the server's slots, the WAL that they retain, and whether the pipeline's slot matches the log.

    The command exits with status 4 if the pipeline's slot is lost or may soon be lost. It measures the WAL rate for a
    second to estimate when the slot will be lost.
    """
    from cdc.capture.startup_checks import check_log
    from cdc.config import load_definition
    from cdc.postgres.connection import connect
    from cdc.postgres.slot import all_slots, slot_limits
    from cdc.service.source_sampler import SourceSampler

    definition = load_definition(config)
    ours = definition.source.slot.name
    with connect(definition.source.dsn.reveal(), application_name="cdc slots") as conn:
        slots, limits = all_slots(conn), slot_limits(conn)
    trouble: CdcError | None = None
    try:
        check_log(definition)
    except CdcError as error:
        trouble = error
    observed = SourceSampler(definition).wait_for_rate(SOURCE_ANSWERS)
    listed = [_slot_to_json(asdict(slot), ours=slot.name == ours) for slot in slots]
    summary = f"{len(slots)} slots; {ours!r} " + ("matches the log" if trouble is None else "does not match the log")
    if json:
        problem = None if trouble is None else trouble.to_json()
        result = {
            "slots": listed,
            "limits": limits,
            "problem": problem,
            "wal_budget": definition.source.wal_budget,
            "at_risk": observed.is_at_risk,
            "seconds_left": observed.seconds_left,
            "forecast": observed.forecast,
        }
        emit("slots ls", json=True, summary=summary, result=result, ok=not observed.is_at_risk)
        _exit_if_at_risk(observed)
        return
    for slot in listed:
        echo(_line(slot))
    echo("  " + "  ".join(f"{name} = {value}" for name, value in limits.items()))
    if trouble is None:
        line(LineMark.GOOD, summary)
    else:
        line(LineMark.BAD, f"{trouble.code} {trouble.message}", fix=trouble.fix)
    if observed.is_at_risk:
        line(LineMark.BAD, observed.forecast or summary, fix=observed.remedy)
    elif observed.safe_bytes is not None and observed.forecast is not None:
        echo(f"  {observed.forecast}")
    _exit_if_at_risk(observed)


def _exit_if_at_risk(observed: SourceObservation) -> None:
    if observed.is_at_risk:
        raise typer.Exit(ExitCode.FINDING.value)


def recover(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: ConfigOption = DEFAULT_CONFIG,
    new_epoch: EpochOption = False,
    skip_to: SkipOption = None,
    resync: ResyncOption = None,
    accept_promotion: PromotionOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Recover after a gap: begin a new epoch with a full copy, accept a promotion, or skip a transaction.

    Stop the reader first. If the command is killed, run it again. The next start of the reader also completes an
    interrupted --new-epoch. With --skip-to, the command marks the tables of --resync as needs_resync.
    """
    from cdc.capture import failover
    from cdc.capture.operator_recovery import begin_epoch, skip_to_lsn
    from cdc.config import load_definition
    from cdc.lsn import Lsn

    definition = load_definition(config)
    if [new_epoch, skip_to is not None, accept_promotion].count(True) != 1:
        raise ConfigError(
            "slots recover needs one of --new-epoch, --accept-promotion and --skip-to LSN",
            remedy="run 'cdc slots ls' to see the problem and its remedy",
        )
    if skip_to is not None and not resync:
        raise ConfigError(
            "--skip-to loses changes, so it needs --resync",
            remedy="name with --resync every table that the skipped transactions changed, or '*' for all tables",
        )
    if new_epoch:
        confirm(f"drop slot {definition.source.slot.name!r} and copy every table of {definition.name!r} again", yes=yes)
        done = begin_epoch(definition)
        later = done["copied_by_reader"]
        copied = f" and copies {', '.join(later)}" if later else ""
        begun = f"epoch {done['epoch']} began at {done['position']} with {done['tables']} tables"
        summary = f"{begun}; start the reader, which continues from that position{copied}"
    elif accept_promotion:
        confirm(f"continue {definition.name!r} from the promoted server, without the transactions it lost", yes=yes)
        followed = failover.accept_promotion(definition)
        done = {"lost_transactions": 0, "lost_tables": {}} if followed is None else followed.to_json()
        listed = ", ".join(done["lost_tables"]) or "no table"
        summary = f"{done['lost_transactions']} transactions are lost; the reader reads rows of {listed} again"
    else:
        lsn = Lsn.parse(skip_to or "")
        confirm(f"move slot {definition.source.slot.name!r} to {lsn} and lose the changes before it", yes=yes)
        done = skip_to_lsn(definition, lsn, resync or [])
        summary = (
            f"slot moved to {done['slot_at']}, {len(done['marked'])} tables marked as needs_resync; start the reader"
        )
    audit(definition, "slots.recover", definition.source.slot.name, done, json=json)
    emit("slots recover", json=json, summary=summary, result=done)


def drop(config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False, json: JsonOption = False) -> None:
    """Drop the pipeline's slot, so that the server can remove WAL; after that the log can continue only in a new epoch.

    The command refuses a slot that is in use, and a slot that has another plugin than pgoutput or belongs to another
    database than the pipeline's.
    """
    from cdc.capture.resume_checks import check_slot_kind
    from cdc.config import load_definition
    from cdc.postgres.connection import connect
    from cdc.postgres.slot import copy_lock, drop_slot, slot_status

    definition = load_definition(config)
    name = definition.source.slot.name
    with connect(definition.source.dsn.reveal(), application_name="cdc slots") as conn, copy_lock(conn, name):
        found = slot_status(conn, name)
        if found is not None:
            check_slot_kind(found, conn.info.dbname)
            confirm(
                f"drop slot {name!r}, which frees {found.retained_bytes:,} bytes of WAL and ends the epoch of the log",
                yes=yes,
            )
            drop_slot(conn, name, confirmed=found.confirmed_flush)
    done = {"slot": name, "dropped": found is not None, "freed_bytes": found.retained_bytes if found else 0}
    if found is not None:
        audit(definition, "slots.drop", name, done, json=json)
    emit(
        "slots drop",
        json=json,
        summary=f"dropped slot {name!r}" if found else f"the server has no slot {name!r}",
        result=done,
    )


def adopt(config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False, json: JsonOption = False) -> None:
    """Assign a slot that you created to this pipeline; the definition must have 'source.slot.create: false'.

    The log then begins at the slot's position, and the reader copies every table while the stream runs. No other
    client may read the slot.
    """
    from cdc.capture.operator_recovery import adopt_slot
    from cdc.config import load_definition

    definition = load_definition(config)
    name = definition.source.slot.name
    confirm(f"assign slot {name!r} to {definition.name!r}, whose reader will advance it", yes=yes)
    done = adopt_slot(definition)
    audit(definition, "slots.adopt", name, done, json=json)
    emit("slots adopt", json=json, summary=f"slot {name!r} at {done['confirmed']} is assigned to this log", result=done)


def _slot_to_json(fields: dict[str, Any], *, ours: bool) -> dict[str, Any]:
    for name in ("restart_lsn", "confirmed_flush", "wal_end"):
        fields[name] = None if fields[name] is None else str(fields[name])
    return {**fields, "ours": ours}


def _line(slot: dict[str, Any]) -> str:
    state = slot["invalidation_reason"] or slot["wal_status"] or "–"
    safe = "" if slot["safe_wal_size"] is None else f"  {slot['safe_wal_size']:,} bytes left"
    use = f"in use by {slot['active_pid']}" if slot["active"] else "idle"
    follows = "  failover" if slot["failover"] else ""
    mark = "*" if slot["ours"] else " "
    names = f"{mark} {slot['name']:<24} {slot['plugin'] or 'physical':<14} {slot['database'] or '–':<14}"
    retained = f"{slot['confirmed_flush'] or '–':<14} {slot['retained_bytes']:>14,} bytes"
    return f"{names} {retained}  {state}{safe}  {use}{follows}"
