-- The statements of the demo after its workload has ended, one for each name; parameters are psycopg's.

-- name: newest_order
-- Return the order whose total becomes invalid, and another order that gets a valid change.
SELECT id, (SELECT max(id) FROM shop.orders WHERE id < newest.id) FROM shop.orders AS newest ORDER BY id DESC LIMIT 1

-- name: break_order
-- Set a total that Postgres can store and a Delta decimal cannot; return the old total.
UPDATE shop.orders SET total = 'NaN' FROM (SELECT id, total FROM shop.orders WHERE id = %(order)s) AS old
WHERE orders.id = old.id RETURNING old.total

-- name: comment_order
-- Make a valid change to the other order.
UPDATE shop.orders SET comment = %(words)s WHERE id = %(order)s

-- name: repair_order
-- Set the total to the sum of the order's items.
UPDATE shop.orders SET total = (SELECT sum(quantity * price) FROM shop.order_items WHERE order_id = %(order)s)
WHERE id = %(order)s RETURNING total
