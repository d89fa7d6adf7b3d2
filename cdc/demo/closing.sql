-- What the demo does to the shop once its load is over, one statement per name; parameters are psycopg's.

-- name: newest_order
-- The order that is to break, and one that changes beside it.
SELECT id, (SELECT max(id) FROM shop.orders WHERE id < newest.id) FROM shop.orders AS newest ORDER BY id DESC LIMIT 1

-- name: break_order
-- What no decimal of Delta can hold, and Postgres can; hands back what was there.
UPDATE shop.orders SET total = 'NaN' FROM (SELECT id, total FROM shop.orders WHERE id = %(order)s) AS old
WHERE orders.id = old.id RETURNING old.total

-- name: comment_order
-- A change beside it, to a row that is sound.
UPDATE shop.orders SET comment = %(words)s WHERE id = %(order)s

-- name: mend_order
-- The total that its items have.
UPDATE shop.orders SET total = (SELECT sum(quantity * price) FROM shop.order_items WHERE order_id = %(order)s)
WHERE id = %(order)s RETURNING total
