-- Removes everything that install.sql created. It may be run again. The reader then infers changes of tables from the
-- stream and the system catalogs, as it did before.

BEGIN;

DROP EVENT TRIGGER IF EXISTS cdc_ddl_end;
DROP EVENT TRIGGER IF EXISTS cdc_drop;
DROP EVENT TRIGGER IF EXISTS cdc_rewrite;
DROP FUNCTION IF EXISTS cdc_source.emit_end(), cdc_source.emit_drop(), cdc_source.emit_rewrite();
-- drop the functions of earlier versions of install.sql
DROP FUNCTION IF EXISTS cdc_source.tell_end(), cdc_source.tell_drop(), cdc_source.tell_rewrite();
DROP FUNCTION IF EXISTS cdc_source.described(oid, text);
DROP TABLE IF EXISTS cdc_source.message_key;
DROP SCHEMA IF EXISTS cdc_source;

COMMIT;
