-- Return the tables that the demo's publication sends; a partitioned table is listed once, under its root.
SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = 'cdc_shop_pub' ORDER BY 1
