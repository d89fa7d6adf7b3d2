-- Event triggers that write every change of a table's definition into the WAL, at the position of the change.
--
-- Run it as a superuser (on a managed service: the role that may create event triggers) in the captured database.
-- It may be run again. It creates the schema cdc_source with a table and four functions, and three event triggers. It
-- changes nothing else. Every command that alters a table then also writes one logical message of about 1 kB, in the
-- same transaction. The functions of the triggers run as the role that installed them. They read only pg_catalog and
-- the table, which has a random key. Each message begins with the key, because every role can write messages with this
-- prefix. No other role can read the key; the comment of a trigger has its SHA-256.

BEGIN;

DROP EVENT TRIGGER IF EXISTS cdc_ddl_end;
DROP EVENT TRIGGER IF EXISTS cdc_drop;
DROP EVENT TRIGGER IF EXISTS cdc_rewrite;

CREATE SCHEMA IF NOT EXISTS cdc_source;
DO $$
BEGIN
    -- somebody who may create schemas could have made one with a table whose key they know
    IF EXISTS (
        SELECT FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
        WHERE n.nspname = 'cdc_source' AND r.rolname <> current_user AND NOT r.rolsuper
    ) THEN
        RAISE EXCEPTION 'schema cdc_source belongs to another role: drop it, then run this script again';
    END IF;
END
$$;
GRANT USAGE ON SCHEMA cdc_source TO PUBLIC;

CREATE TABLE IF NOT EXISTS cdc_source.message_key (
    number int PRIMARY KEY CHECK (number = 1),
    key text NOT NULL CHECK (length(key) = 72)
);
REVOKE ALL ON cdc_source.message_key FROM PUBLIC;
INSERT INTO cdc_source.message_key VALUES (1, gen_random_uuid()::text || gen_random_uuid()::text)
ON CONFLICT DO NOTHING;

-- Return the definition of one table as this transaction sees it, and whether these triggers observe it.
CREATE OR REPLACE FUNCTION cdc_source.described(relation oid, command text) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_build_object(
        'oid', c.oid::bigint, 'command', command, 'schema', n.nspname, 'name', c.relname,
        'identity', c.relreplident,
        'root', CASE WHEN c.relkind = 'p' OR c.relispartition THEN pg_partition_root(c.oid)::oid::bigint END,
        'key', (
            SELECT to_jsonb((i.indkey::int2[])[0:i.indnkeyatts - 1]) FROM pg_index i
            WHERE i.indrelid = c.oid AND i.indisvalid AND CASE c.relreplident
                WHEN 'i' THEN i.indisreplident
                WHEN 'n' THEN false
                ELSE i.indisprimary AND i.indimmediate END),
        'attributes', (
            SELECT jsonb_agg(jsonb_build_array(
                a.attnum, a.attname, a.attisdropped, a.atttypid::bigint, a.atttypmod, a.attnotnull,
                a.attgenerated::text <> '', a.atthasdef OR a.attidentity::text <> '',
                (SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d
                 WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum),
                coalesce((a.attmissingval::text::text[])[1], (
                    SELECT (l.attmissingval::text::text[])[1] FROM pg_partition_tree(c.oid) p
                    JOIN pg_attribute l ON l.attrelid = p.relid AND l.attname = a.attname AND l.atthasmissing
                    WHERE p.isleaf AND p.relid <> a.attrelid LIMIT 1))) ORDER BY a.attnum)
            FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0),
        'witness', (
            SELECT string_agg(t.oid::text || ':' || t.xmin::text, ' ' ORDER BY t.evtname)
                || ' ' || max(obj_description(t.oid, 'pg_event_trigger'))
            FROM pg_event_trigger t
            WHERE t.evtname IN ('cdc_ddl_end', 'cdc_drop', 'cdc_rewrite') AND t.evtenabled = 'A'
            HAVING count(*) = 3))
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = relation AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
    AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
$$;

-- After a command, write a message for every table that it created or altered, directly or through an index, a type
-- or its schema, and for the tables that inherit from it: a command that recurses to them does not list them.
CREATE OR REPLACE FUNCTION cdc_source.emit_end() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_logical_emit_message(true, 'cdc.ddl', k.key || ' ' || d.description::text)
    FROM (WITH RECURSIVE altered AS (
        SELECT found.oid, max(found.command_tag) AS tag
        FROM (
            SELECT coalesce(i.indrelid, c.objid) AS oid, c.command_tag FROM pg_event_trigger_ddl_commands() c
            LEFT JOIN pg_index i ON i.indexrelid = c.objid
            WHERE c.classid = 'pg_class'::regclass
            UNION ALL
            SELECT pg_partition_root(c.objid)::oid, c.command_tag FROM pg_event_trigger_ddl_commands() c
            WHERE c.classid = 'pg_class'::regclass
            UNION ALL
            SELECT a.attrelid, c.command_tag FROM pg_event_trigger_ddl_commands() c
            JOIN pg_type t ON c.objid IN (t.oid, t.typelem, t.typbasetype)
            JOIN pg_attribute a ON a.atttypid = t.oid AND a.attnum > 0
            WHERE c.classid = 'pg_type'::regclass
            UNION ALL
            SELECT r.oid, c.command_tag FROM pg_event_trigger_ddl_commands() c
            JOIN pg_class r ON r.relnamespace = c.objid
            WHERE c.classid = 'pg_namespace'::regclass AND c.command_tag = 'ALTER SCHEMA'
        ) found
        GROUP BY found.oid
    ), affected AS (
        SELECT altered.oid, altered.tag FROM altered
        UNION
        SELECT h.inhrelid, p.tag FROM affected p JOIN pg_inherits h ON h.inhparent = p.oid
        JOIN pg_class c ON c.oid = h.inhparent AND c.relkind = 'r'
    )
    SELECT affected.oid, max(affected.tag) AS tag FROM affected GROUP BY affected.oid
    ) changed, cdc_source.message_key k, LATERAL (SELECT cdc_source.described(changed.oid, changed.tag)) d (description)
    WHERE d.description IS NOT NULL;
END
$$;

-- After a drop, write a message for every dropped table, and for every table that lost a column by CASCADE.
CREATE OR REPLACE FUNCTION cdc_source.emit_drop() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_logical_emit_message(true, 'cdc.ddl', k.key || ' ' || jsonb_build_object(
        'oid', o.objid::bigint, 'command', tg_tag, 'dropped', true)::text)
    FROM pg_event_trigger_dropped_objects() o, cdc_source.message_key k
    WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0 AND o.object_type = 'table' AND NOT o.is_temporary;

    PERFORM pg_logical_emit_message(true, 'cdc.ddl', k.key || ' ' || d.description::text)
    FROM (SELECT DISTINCT o.objid FROM pg_event_trigger_dropped_objects() o
          WHERE o.classid = 'pg_class'::regclass AND o.objsubid > 0) altered, cdc_source.message_key k,
         LATERAL (SELECT cdc_source.described(altered.objid, tg_tag)) d (description)
    WHERE d.description IS NOT NULL;
END
$$;

-- Before ALTER TABLE rewrites a table, write a message with the reason: 1 LOGGED or UNLOGGED, 2 the default of a new
-- column, 4 a type, 8 the access method.
CREATE OR REPLACE FUNCTION cdc_source.emit_rewrite() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    relation oid := pg_event_trigger_table_rewrite_oid();
BEGIN
    PERFORM pg_logical_emit_message(true, 'cdc.ddl', k.key || ' ' || jsonb_build_object(
        'oid', coalesce(pg_partition_root(relation)::oid, relation)::bigint, 'command', tg_tag,
        'rewrite', pg_event_trigger_table_rewrite_reason())::text)
    FROM cdc_source.message_key k;
END
$$;

CREATE EVENT TRIGGER cdc_ddl_end ON ddl_command_end EXECUTE FUNCTION cdc_source.emit_end();
CREATE EVENT TRIGGER cdc_drop ON sql_drop EXECUTE FUNCTION cdc_source.emit_drop();
CREATE EVENT TRIGGER cdc_rewrite ON table_rewrite EXECUTE FUNCTION cdc_source.emit_rewrite();
-- drop the functions of earlier versions of this script
DROP FUNCTION IF EXISTS cdc_source.tell_end(), cdc_source.tell_drop(), cdc_source.tell_rewrite();
-- fire also in sessions with session_replication_role = replica, which alter tables as well
ALTER EVENT TRIGGER cdc_ddl_end ENABLE ALWAYS;
ALTER EVENT TRIGGER cdc_drop ENABLE ALWAYS;
ALTER EVENT TRIGGER cdc_rewrite ENABLE ALWAYS;
DO $$
BEGIN
    EXECUTE format('COMMENT ON EVENT TRIGGER cdc_ddl_end IS %L', (
        SELECT encode(sha256(convert_to(k.key, 'UTF8')), 'hex') FROM cdc_source.message_key k));
END
$$;

COMMIT;

-- A command that began before the triggers existed fires none of them, so wait until such transactions have ended.
DO $$
DECLARE
    installed timestamptz := clock_timestamp();
BEGIN
    WHILE EXISTS (
        SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND backend_type = 'client backend' AND xact_start < installed
    ) LOOP
        PERFORM pg_sleep(0.05), pg_stat_clear_snapshot();
    END LOOP;
END
$$;

-- Write a message with the present definition of every published table; each later change writes its own message.
DO $$
BEGIN
    PERFORM pg_logical_emit_message(true, 'cdc.ddl', k.key || ' ' || cdc_source.described(t.oid, 'INSTALL')::text)
    FROM cdc_source.message_key k, (SELECT DISTINCT c.oid FROM pg_publication_tables p
          JOIN pg_namespace n ON n.nspname = p.schemaname
          JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename) t
    WHERE cdc_source.described(t.oid, 'INSTALL') IS NOT NULL;
END
$$;
