-- Insert the rows that exist before the pipeline starts; they are the same at every run.
SELECT setseed(0.42);

INSERT INTO shop.customers (id, public_id, name, email, active, spent, tags, profile, avatar, joined_at)
SELECT n, md5('customer ' || n)::uuid,
       (ARRAY['Ada', 'Grace', 'Edsger', 'Łukasz', 'Zoë', '千代', 'Ольга', 'Nûr'])[1 + n % 8] || ' ' || n,
       'customer' || n || '@shop.example', n % 17 <> 0, 0,
       CASE n % 3 WHEN 0 THEN '{}' WHEN 1 THEN ARRAY['new'] ELSE ARRAY['vip', 'a "quoted", tag'] END,
       CASE WHEN n % 5 > 0 THEN jsonb_build_object('visits', n, 'city', 'Città ' || n % 40, 'newsletter', n % 2 = 0) END,
       CASE WHEN n % 4 = 0 THEN decode(md5('avatar ' || n), 'hex') END,
       timestamptz '2024-01-01 00:00:00.123456+00' + n * interval '7 hours 13 minutes'
FROM generate_series(1, 1000) AS n;

INSERT INTO shop.products (id, sku, name, description, price, weight, stock, sizes, released_on)
SELECT n, 'SKU-' || to_char(n, 'FM00000'),
       (ARRAY['blue', 'red', 'green', 'black', 'striped'])[1 + n % 5] || ' '
           || (ARRAY['mug', 'lamp', 'chair', 'scarf', 'notebook', 'kettle', 'clock'])[1 + n % 7],
       CASE WHEN n % 9 > 0 THEN E'A thing of use.\n\tMade in ' || (ARRAY['Tórshavn', 'Kraków', '京都'])[1 + n % 3] || '.' END,
       round((3 + random() * 200)::numeric, 2), random() * 10, 10000,
       CASE WHEN n % 6 = 0 THEN ARRAY[38, 40, NULL, 42] END, date '2023-05-01' + n
FROM generate_series(1, 200) AS n;

INSERT INTO shop.order_items (order_id, line, product_id, quantity, price)
SELECT o, l, 1 + (o * 31 + l * 17) % 200, 1 + (o + l) % 4, round((3 + random() * 200)::numeric, 2)
FROM generate_series(1, 5000) AS o, LATERAL generate_series(1, 1 + o % 5) AS l;

-- the total of an order is always the sum of its items
INSERT INTO shop.orders (id, customer_id, status, total, comment, placed_at, changed_at)
SELECT n, 1 + n * 7919 % 1000, (enum_range(NULL::shop.order_status))[1 + n % 5],
       (SELECT sum(quantity * price) FROM shop.order_items WHERE order_id = n),
       CASE n % 10 WHEN 0 THEN E'leave at the door\nring twice\t(twice!) \\o/' WHEN 5 THEN '' END,
       timestamptz '2025-06-01 08:00:00+00' + n * interval '11 minutes', timestamptz '2025-06-01 09:00:00+00' + n * interval '11 minutes'
FROM generate_series(1, 5000) AS n;

INSERT INTO shop.notes (slug, title, body, starred, edited_at)
SELECT 'note-' || n, 'Note ' || n, (SELECT string_agg(md5(n || ':' || i), '') FROM generate_series(1, 260 + n * 3) AS i),
       n % 7 = 0, timestamptz '2025-03-01 12:00:00+00' + n * interval '1 hour'
FROM generate_series(1, 60) AS n;

INSERT INTO shop.events (id, day, kind, detail)
SELECT n, date '2025-10-01' + n % 200, (ARRAY['view', 'search', 'login'])[1 + n % 3], jsonb_build_object('n', n, 'p', random())
FROM generate_series(1, 2000) AS n;

INSERT INTO shop.carts (id, customer_id, items, opened_at)
SELECT n, n, jsonb_build_array(n, n + 1), CASE WHEN n % 2 = 0 THEN timestamptz '2025-12-01 00:00:00+00' END FROM generate_series(1, 50) AS n;

SELECT setval(pg_get_serial_sequence('shop.customers', 'id'), 1000),
       setval(pg_get_serial_sequence('shop.orders', 'id'), 5000),
       setval(pg_get_serial_sequence('shop.events', 'id'), 2000);

ANALYZE;
