-- What the shop's application does, one statement per name; parameters are psycopg's.

-- name: place_order
-- An order as it is first written.
INSERT INTO shop.orders (customer_id, total, comment, placed_at, changed_at)
VALUES (%(customer)s, %(total)s, %(comment)s, now(), now()) RETURNING id

-- name: add_item
-- One line of an order.
INSERT INTO shop.order_items (order_id, line, product_id, quantity, price)
VALUES (%(order)s, %(line)s, %(product)s, %(quantity)s, %(price)s)

-- name: take_stock
-- The order's effect on its product.
UPDATE shop.products SET stock = stock - %(quantity)s WHERE id = %(product)s

-- name: advance_order
-- One step along placed, paid, shipped, delivered.
UPDATE shop.orders SET changed_at = clock_timestamp(), status = CASE status
    WHEN 'placed' THEN 'paid'::shop.order_status WHEN 'paid' THEN 'shipped' WHEN 'shipped' THEN 'delivered' ELSE 'paid' END
WHERE id = %(order)s

-- name: charge_customer
-- The payment of an order.
UPDATE shop.customers SET spent = spent + %(amount)s WHERE id = %(customer)s

-- name: drop_items
-- The lines of a cancelled order.
DELETE FROM shop.order_items WHERE order_id = %(order)s

-- name: drop_order
-- A cancelled order.
DELETE FROM shop.orders WHERE id = %(order)s

-- name: join_shop
-- A new customer.
INSERT INTO shop.customers (public_id, name, email, tags, profile, avatar, joined_at)
VALUES (%(public_id)s, %(name)s, %(email)s, %(tags)s, %(profile)s::jsonb, %(avatar)s, now()) RETURNING id

-- name: edit_customer
-- A profile of many types, written whole.
UPDATE shop.customers SET name = %(name)s, active = NOT active, tags = %(tags)s, profile = %(profile)s::jsonb, avatar = %(avatar)s
WHERE id = %(customer)s

-- name: edit_product
-- Price and words of a product.
UPDATE shop.products SET price = %(price)s, description = %(words)s, sizes = %(sizes)s, weight = %(weight)s WHERE id = %(product)s

-- name: write_note
-- A note with a body that Postgres stores out of line.
INSERT INTO shop.notes (slug, title, body, edited_at) VALUES (%(slug)s, %(title)s, %(body)s, now())

-- name: star_note
-- An update that leaves the large body alone.
UPDATE shop.notes SET starred = NOT starred, edited_at = clock_timestamp() WHERE slug = %(slug)s

-- name: rewrite_note
-- An update of the large body.
UPDATE shop.notes SET body = %(body)s, edited_at = clock_timestamp() WHERE slug = %(slug)s

-- name: move_note
-- A change of the key that leaves the large body alone.
UPDATE shop.notes SET slug = %(to)s WHERE slug = %(slug)s

-- name: drop_note
-- A deleted note.
DELETE FROM shop.notes WHERE slug = %(slug)s

-- name: record_event
-- A row of the partitioned table.
INSERT INTO shop.events (day, kind, detail) VALUES (%(day)s, %(kind)s, %(detail)s::jsonb) RETURNING id

-- name: move_event
-- A change of the key that may move the row to another partition.
UPDATE shop.events SET day = %(day)s WHERE id = %(event)s

-- name: drop_event
-- A deleted event.
DELETE FROM shop.events WHERE id = %(event)s

-- name: empty_carts
-- Every cart at once.
TRUNCATE shop.carts

-- name: fill_carts
-- The carts again, with other contents.
INSERT INTO shop.carts (id, customer_id, items, opened_at)
SELECT n, 1 + n * 13 %% 1000, jsonb_build_array(n, %(salt)s::int), CASE WHEN n %% 3 > 0 THEN now() END FROM generate_series(1, %(carts)s) AS n

-- name: drop_cart
-- A cart, to be written again in the same transaction.
DELETE FROM shop.carts WHERE id = %(cart)s

-- name: put_cart
-- One cart.
INSERT INTO shop.carts (id, customer_id, items, opened_at) VALUES (%(cart)s, %(customer)s, '[]', NULL)
ON CONFLICT (id) DO UPDATE SET items = shop.carts.items || '1'

-- name: move_cart
-- A change of a cart's key.
UPDATE shop.carts SET id = %(to)s WHERE id = %(cart)s

-- name: add_column
-- The schema change on the way.
ALTER TABLE shop.orders ADD COLUMN IF NOT EXISTS gift_note text

-- name: write_gift_note
-- A value of the column that was not there at the start.
UPDATE shop.orders SET gift_note = %(words)s WHERE id = %(order)s
