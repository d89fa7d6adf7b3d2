-- The tables that the demo's publication sends, partitioned ones by their root.
SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = 'cdc_shop_pub' ORDER BY 1
