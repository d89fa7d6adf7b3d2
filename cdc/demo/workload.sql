-- The statements of the demo's workload, one for each name; parameters are psycopg's.

-- name: place_order
-- Insert an order.
INSERT INTO shop.orders (customer_id, total, comment, placed_at, changed_at)
VALUES (%(customer)s, %(total)s, %(comment)s, now(), now()) RETURNING id

-- name: add_item
-- Insert one line of an order.
INSERT INTO shop.order_items (order_id, line, product_id, quantity, price)
VALUES (%(order)s, %(line)s, %(product)s, %(quantity)s, %(price)s)

-- name: take_stock
-- Reduce the stock of an ordered product.
UPDATE shop.products SET stock = stock - %(quantity)s WHERE id = %(product)s

-- name: advance_order
-- Advance the status of an order by one step: placed, paid, shipped, delivered.
UPDATE shop.orders SET changed_at = clock_timestamp(), status = CASE status
    WHEN 'placed' THEN 'paid'::shop.order_status WHEN 'paid' THEN 'shipped' WHEN 'shipped' THEN 'delivered' ELSE 'paid' END
WHERE id = %(order)s

-- name: charge_customer
-- Add the payment of an order to its customer.
UPDATE shop.customers SET spent = spent + %(amount)s WHERE id = %(customer)s

-- name: drop_items
-- Delete the lines of a cancelled order.
DELETE FROM shop.order_items WHERE order_id = %(order)s

-- name: drop_order
-- Delete a cancelled order.
DELETE FROM shop.orders WHERE id = %(order)s

-- name: join_shop
-- Insert a customer.
INSERT INTO shop.customers (public_id, name, email, tags, profile, avatar, joined_at)
VALUES (%(public_id)s, %(name)s, %(email)s, %(tags)s, %(profile)s::jsonb, %(avatar)s, now()) RETURNING id

-- name: edit_customer
-- Update columns of many types in one statement.
UPDATE shop.customers SET name = %(name)s, active = NOT active, tags = %(tags)s, profile = %(profile)s::jsonb, avatar = %(avatar)s
WHERE id = %(customer)s

-- name: edit_product
-- Update price, description, sizes and weight of a product.
UPDATE shop.products SET price = %(price)s, description = %(words)s, sizes = %(sizes)s, weight = %(weight)s WHERE id = %(product)s

-- name: write_note
-- Insert a note with a body that Postgres stores out of line.
INSERT INTO shop.notes (slug, title, body, edited_at) VALUES (%(slug)s, %(title)s, %(body)s, now())

-- name: star_note
-- Update a note without its large body, which Postgres then does not send.
UPDATE shop.notes SET starred = NOT starred, edited_at = clock_timestamp() WHERE slug = %(slug)s

-- name: rewrite_note
-- Update the large body of a note.
UPDATE shop.notes SET body = %(body)s, edited_at = clock_timestamp() WHERE slug = %(slug)s

-- name: move_note
-- Change the key of a note without its large body.
UPDATE shop.notes SET slug = %(to)s WHERE slug = %(slug)s

-- name: drop_note
-- Delete a note.
DELETE FROM shop.notes WHERE slug = %(slug)s

-- name: record_event
-- Insert a row into the partitioned table.
INSERT INTO shop.events (day, kind, detail) VALUES (%(day)s, %(kind)s, %(detail)s::jsonb) RETURNING id

-- name: move_event
-- Change a key, which may move the row to another partition.
UPDATE shop.events SET day = %(day)s WHERE id = %(event)s

-- name: drop_event
-- Delete an event.
DELETE FROM shop.events WHERE id = %(event)s

-- name: empty_carts
-- Remove all carts.
TRUNCATE shop.carts

-- name: fill_carts
-- Insert all carts again, with other contents.
INSERT INTO shop.carts (id, customer_id, items, opened_at)
SELECT n, 1 + n * 13 %% 1000, jsonb_build_array(n, %(salt)s::int), CASE WHEN n %% 3 > 0 THEN now() END FROM generate_series(1, %(carts)s) AS n

-- name: drop_cart
-- Delete a cart, which the same transaction inserts again.
DELETE FROM shop.carts WHERE id = %(cart)s

-- name: put_cart
-- Insert a cart, or update it if it exists.
INSERT INTO shop.carts (id, customer_id, items, opened_at) VALUES (%(cart)s, %(customer)s, '[]', NULL)
ON CONFLICT (id) DO UPDATE SET items = shop.carts.items || '1'

-- name: move_cart
-- Change the key of a cart.
UPDATE shop.carts SET id = %(to)s WHERE id = %(cart)s

-- name: add_column
-- Add a column: the schema change of the workload.
ALTER TABLE shop.orders ADD COLUMN IF NOT EXISTS gift_note text

-- name: write_gift_note
-- Set the added column of an order.
UPDATE shop.orders SET gift_note = %(words)s WHERE id = %(order)s
