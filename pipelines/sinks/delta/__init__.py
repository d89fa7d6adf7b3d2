"""The Delta sink: writes one Delta table (target) per source table, and one published record next to the targets.

Functions that process a batch
==============================
These functions process one batch, from its merge to the published record. The target keeps the latest state, and the
indexed writer writes it. An indented function is called by the function above it.

    DeltaSink.apply                    sink.py                  lock the target, retry after a commit conflict
      _apply_once                                               open, merge unless merged before, return the record
    plan
        OpenTargets.open_for           open_targets.py          remove columns that an attempt before a crash added
          open                                                  find or create the target, check identity and layout
            DeltaTarget.refresh        delta_target.py          read the commits of other clients
        check_columns                  open_targets.py          refuse a change that needs a full copy
        in_target_columns                                       give the batch the columns and types of the target
        LatestState.merge              latest_state_strategy.py all steps up to the commit, in their order
          _bases                                                choose the version with the base rows
    evolve
          _evolve                                               change columns, then fill in defaults of new ones
            DeltaTarget.evolve_columns delta_target.py          change the columns in one commit, or in none
              plan                     schema_evolution.py      plan the change of the columns
            fill_defaults              delta_target.py
    fold to rows, base rows, overlay
          _source                      latest_state_strategy.py make the rows to merge
            table_source               merge_source.py          convert complete images, then partial ones
              source_rows                                       convert deletes and complete images
              overlay                                           fill unsent columns from the base rows
                find_base_rows
                  rows_with_keys                                scan the target once
    write
          Writers.choose               writers.py               choose the indexed writer or Spark
            IndexedTargets.can_merge   open_indexed_tables.py   read the commits of other clients, check the features
          DeltaTarget.erase            delta_target.py          delete rows that a truncate or a finished copy removes
          Writers.merge                writers.py
            IndexedTable.merge         indexed_writer.py        merge in one commit with the `txn` of the range
              KeyIndex.find            indexed/                 find the rows of the keys; see how-a-row-is-updated.md
              FileRewriter.write       copy_on_write.py         copy files without old rows, if there are no vectors
    record, publish
        DeltaSink.record               sink.py                  return position, version and state of the table
    DeltaSink.publish                                           called when all tables of the range are merged
      PublishedTable.write             published_cuts_table.py  add one row in one commit
        check                                                   check that no other driver published since

A batch whose rows are on Spark's executors (TableBatch.parts) differs in two steps. ExecutorMerge (executor_merge.py)
makes the rows to merge from source_rows and overlay, in tasks of Spark, which get the base rows by RowLookup
(executor_row_lookup.py). Then executors write new files, and deletion vectors for the old rows that KeySearch finds
(executor_upsert.py), and the driver commits them; otherwise Delta's MERGE writes the rows. The next small batch reads
that commit, and adds the keys of its files to the index, or lets a thread do it if they are many
(background_indexing.py). KeylessMerge (executor_keyless.py) does the same for a table without a key: it counts equal
rows, and finds an equal row of the target for each delete.

A target with history differs after in_target_columns: History.merge (history_strategy.py) evolves the columns, and
HistoryMerge (history_merge.py) completes every change, makes the rows of the history mode and writes them. If its
changes are on Spark's executors, ExecutorHistory (executor_history.py) does this in a task for each part of the keys,
which gets the rows that they change by RowLookup.

Interfaces with several implementations
=======================================
What a target keeps of a row: MergeStrategy (sink.py), implemented by LatestState and History. History has
one HistoryRows for each history mode: versions, marked rows and every change (append).
Which rows of a target belong to a table: TargetPart (target_part.py), implemented by WholeTarget, and by SharedPart
for rules with merge_tables.
Which engine writes: Writers (writers.py) chooses the indexed writer or Spark. SparkTarget is for targets with table
features that delta-rs cannot write.

Crashes
=======
The last commit of each merged range contains a `txn` with the end position of the range, so a range is merged once.
After a crash between merge and publish, a target contains changes beyond the published record. When a driver opens the
sink, reconcile_at_open.py compares the targets with that record. Base rows are then read from the published version.
"""
