-- Takes away what install.sql made. It may be run again. From here on the reader concludes again what it was told.

BEGIN;

DROP EVENT TRIGGER IF EXISTS cdc_ddl_end;
DROP EVENT TRIGGER IF EXISTS cdc_drop;
DROP EVENT TRIGGER IF EXISTS cdc_rewrite;
DROP FUNCTION IF EXISTS cdc_source.tell_end();
DROP FUNCTION IF EXISTS cdc_source.tell_drop();
DROP FUNCTION IF EXISTS cdc_source.tell_rewrite();
DROP FUNCTION IF EXISTS cdc_source.described(oid, text);
DROP SCHEMA IF EXISTS cdc_source;

COMMIT;
